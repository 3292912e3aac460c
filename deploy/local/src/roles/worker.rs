//! What makes a process a scatter worker: the device's thread, its way to combiners, and the service in front of it.

use std::sync::Arc;

use anyhow::{Context, Result};
use futures::FutureExt;
use futures::future::BoxFuture;
use hypic_cluster::{MemberRecord, NodeLoad, Role};
use hypic_kernels::Cpu;
use hypic_scatter_worker::{Interest, Worker};
use hypic_telemetry::Open;
use hypic_transport::grpc::{GrpcTransport, ScatterService};
use hypic_transport::{Delivered, DeliveryError, KvAhead, Parcel, Scatter, Transport};
use tonic::service::Routes;

use super::admin::Joined;
use super::compute::{Begun, Loaded, worker_config};
use super::{Process, gauges};

pub(super) fn begin(process: &Process, joined: &Arc<Joined>, record: MemberRecord, loaded: Loaded) -> Result<Begun> {
    let Loaded { device, model, served, store, .. } = loaded;
    let members = joined.clone();
    let resolve = Arc::new(move |id: &str| {
        let peer = members.peers.get()?.find(id)?;
        (peer.record().role == Role::Combiner).then(|| peer.channel())
    });
    let deliveries = Open::default();
    let sender =
        GrpcTransport::new(process.config.transfer.grpc(), device.clone(), model.layout().clone(), served, resolve);
    let transport = Arc::new(Counted { sender, open: deliveries.clone() });
    let worker = Worker::start(worker_config(process), device, model, store, transport, Interest::default());
    let worker = Arc::new(worker.context("cannot start the worker")?);
    let mut gauges = gauges::of_worker(&worker);
    gauges.push(gauges::of_deliveries(&deliveries));
    let scatter: Arc<dyn Scatter> = worker.clone();
    Ok(Begun {
        routes: Routes::new(ScatterService::server(scatter, served)),
        record,
        load: Arc::new(move || NodeLoad { backlog_tokens: worker.backlog_tokens(), ..NodeLoad::default() }),
        gauges,
    })
}

/// A transport whose deliveries under way are counted.
struct Counted {
    sender: GrpcTransport<Cpu>,
    open: Open,
}

impl Transport<Cpu> for Counted {
    fn ahead(&self) -> Option<KvAhead<Cpu>> {
        self.sender.ahead()
    }

    fn deliver(&self, parcel: Parcel<Cpu>) -> BoxFuture<'static, Result<Delivered, DeliveryError>> {
        let (open, delivery) = (self.open.enter(), self.sender.deliver(parcel));
        async move {
            let _open = open;
            delivery.await
        }
        .boxed()
    }
}
