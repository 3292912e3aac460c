//! What makes a process a combiner: the device's thread, the receiving end of transfers, and a worker beside it as the
//! last resort for what no worker delivers.

use std::sync::Arc;

use anyhow::{Context, Result};
use hypic_cluster::{MemberRecord, NodeLoad};
use hypic_combiner::{Combiner, CombinerConfig};
use hypic_kernels::Cpu;
use hypic_scatter_worker::{Interest, Worker};
use hypic_transport::grpc::{CombineService, Receiver, ScatterService};
use hypic_transport::{Exchange, Scatter};
use tonic::service::Routes;

use super::compute::{Begun, Loaded, worker_config};
use super::{Process, gauges};

pub(super) fn begin(process: &Process, mut record: MemberRecord, loaded: Loaded) -> Result<Begun> {
    let Loaded { threads, device, model, served, store, store_config } = loaded;
    let exchange = Exchange::default();
    let (cpu, own) = (Cpu::with_isa(threads, device.isa()), Arc::new(exchange.clone()));
    let last = Worker::start(worker_config(process), cpu, model.clone(), store.clone(), own, Interest::default());
    let last = Arc::new(last.context("cannot start the last resort")?);
    let mut gauges = gauges::of_worker(&last);
    gauges.extend(gauges::of_exchange(&exchange));
    let last: Arc<dyn Scatter> = last;
    let section = &process.config.combiner;
    let settings = CombinerConfig {
        chunk_rows: section.chunk_rows,
        max_sequences: section.max_sequences,
        max_waiting: section.max_waiting,
        ..CombinerConfig::named(process.id.as_str())
    };
    let layout = model.layout().clone();
    let receiver =
        Receiver::new(process.config.transfer.grpc(), device.clone(), layout, served, store.clone(), exchange.clone());
    let combiner = Combiner::start(settings, device, model, store, store_config, exchange, last.clone());
    let combiner = Arc::new(combiner.context("cannot start the combiner")?);
    gauges.extend(gauges::of_combiner(&combiner));
    let (fixed, per_token, budget) = combiner.prefix_sizes();
    record.prefix_fixed_bytes = fixed as u64;
    record.prefix_token_bytes = per_token as u64;
    record.prefix_budget_bytes = budget as u64;
    let loads = combiner.clone();
    let load = move || {
        let load = loads.load();
        let count = |n| u32::try_from(n).unwrap_or(u32::MAX);
        NodeLoad { backlog_tokens: 0, sequences: count(load.sequences), waiting: count(load.waiting) }
    };
    let routes = Routes::new(CombineService::server(combiner, receiver, served))
        .add_service(ScatterService::server(last, served));
    Ok(Begun { routes, record, load: Arc::new(load), gauges })
}
