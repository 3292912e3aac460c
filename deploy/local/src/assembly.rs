//! Router, scatter workers and combiner, joined in one process.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use hypic_cache::{Fingerprint, KeySpace, Stats, Store, StoreConfig};
use hypic_combiner::{Combiner, CombinerConfig, CombinerLoad, PrefixState};
use hypic_kernels::{Backend, Cpu};
use hypic_model::{Checkpoint, Config, LoadOptions, Model};
use hypic_router::{Fleet, ModelCard, Router, RouterConfig, Sampling, Served, View};
use hypic_scatter_worker::{Interest, Worker, WorkerConfig};
use hypic_state::DType;
use hypic_text::TextPipeline;
use hypic_transport::{Combine, Exchange, SamplingParams, Scatter, Transport};

/// Settings of a process with all roles.
#[derive(Clone, Debug)]
pub struct LocalConfig {
    /// Name under which the model is served.
    pub name: String,
    /// Dtype in which it is computed; `None`: the checkpoint's where the CPU has instructions for it, else f32.
    pub dtype: Option<DType>,
    /// Scatter workers.
    pub workers: usize,
    /// Threads of the combiner; the workers share as many.
    pub threads: usize,
    /// Bytes of entries and prefix states.
    pub cache_bytes: usize,
    /// Settings of the router.
    pub router: RouterConfig,
}

impl LocalConfig {
    /// The defaults on this machine.
    pub fn named(name: impl Into<String>) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        LocalConfig {
            name: name.into(),
            dtype: None,
            workers: threads.min(4),
            threads,
            cache_bytes: StoreConfig::default().capacity_bytes,
            router: RouterConfig::default(),
        }
    }
}

/// All roles, running. Dropping it stops them.
pub struct Local {
    // Dropped first: nothing new reaches the roles.
    router: Arc<Router>,
    combiner: Arc<Combiner<Cpu>>,
    store: Store<Cpu, PrefixState<Cpu>>,
    exchange: Exchange<Cpu>,
    model: Model<Cpu>,
    kernel_set: String,
}

impl Local {
    /// Load the model and start the roles. `progress` is told the name of each tensor that has been read.
    ///
    /// # Errors
    /// If the model cannot be loaded, or the system gives no threads.
    pub fn start(
        config: LocalConfig,
        checkpoint: &Checkpoint,
        text: Option<Arc<TextPipeline>>,
        progress: &dyn Fn(&str),
    ) -> Result<Self> {
        if config.workers == 0 {
            bail!("--workers 0: at least one scatter worker is needed");
        }
        let device = Cpu::new(config.threads);
        let dtype = compute_dtype(&device, checkpoint, config.dtype)?;
        let model = Model::load(&device, checkpoint, LoadOptions { dtype, progress })?;
        for prefix in model.ignored() {
            tracing::info!(prefix, "the checkpoint's tensors of this prefix are not served");
        }
        if let Some(text) = &text
            && text.tokenizer().vocab_size() > model.spec().vocab
        {
            let (ids, rows) = (text.tokenizer().vocab_size(), model.spec().vocab);
            bail!(
                "tokenizer.json has {ids} token ids but the model's embedding has {rows} rows: they do not belong together"
            );
        }
        let store_config = StoreConfig { capacity_bytes: config.cache_bytes };
        let store: Store<Cpu, PrefixState<Cpu>> = Store::new(store_config);
        let exchange = Exchange::default();
        let interest = Interest::default();
        let transport: Arc<dyn Transport<Cpu>> = Arc::new(exchange.clone());
        let threads = (config.threads / config.workers).max(1);
        let mut scatter: Vec<Arc<dyn Scatter>> = Vec::with_capacity(config.workers);
        for i in 0..config.workers {
            let settings = WorkerConfig::named(format!("worker-{i}"));
            let (backend, model) = (Cpu::with_isa(threads, device.isa()), model.clone());
            let worker = Worker::start(settings, backend, model, store.clone(), transport.clone(), interest.clone());
            scatter.push(Arc::new(worker.context("cannot start a scatter worker")?));
        }
        let settings = CombinerConfig::named("combiner-0");
        let kernel_set = device.kernel_set();
        // In one process a worker is as good a last resort as any.
        let last_resort = scatter[0].clone();
        let (shared, arrivals) = (store.clone(), exchange.clone());
        let combiner = Combiner::start(settings, device, model.clone(), shared, store_config, arrivals, last_resort);
        let combiner = Arc::new(combiner.context("cannot start the combiner")?);
        let served = served(&config.name, &model, checkpoint)?;
        let combiners: Vec<Arc<dyn Combine>> = vec![combiner.clone()];
        let fleet = Arc::new(Fleet::new(View { scatter, combiners }));
        let router = Arc::new(Router::new(config.router, served, text, fleet));
        Ok(Local { router, combiner, store, exchange, model, kernel_set })
    }

    /// What answers requests.
    pub fn router(&self) -> &Arc<Router> {
        &self.router
    }

    /// The model.
    pub fn model(&self) -> &Model<Cpu> {
        &self.model
    }

    /// Name of the kernels in use.
    pub fn kernel_set(&self) -> &str {
        &self.kernel_set
    }

    /// What the cache holds.
    pub fn cache(&self) -> Stats {
        self.store.stats()
    }

    /// The entries and prefix states.
    pub fn store(&self) -> &Store<Cpu, PrefixState<Cpu>> {
        &self.store
    }

    /// What the combiner has to do.
    pub fn load(&self) -> CombinerLoad {
        self.combiner.load()
    }

    /// Transfers that are open.
    pub fn open_transfers(&self) -> usize {
        self.exchange.open_transfers()
    }
}

fn compute_dtype(device: &Cpu, checkpoint: &Checkpoint, asked: Option<DType>) -> Result<DType> {
    match asked {
        Some(dtype @ (DType::F32 | DType::Bf16)) => Ok(dtype),
        Some(other) => bail!("--dtype {other}: use auto, f32 or bf16"),
        None => Ok(checkpoint.dtype().filter(|&d| device.supports(d)).unwrap_or(DType::F32)),
    }
}

fn served(name: &str, model: &Model<Cpu>, checkpoint: &Checkpoint) -> Result<Served> {
    let spec = model.spec();
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let context = u32::try_from(spec.max_positions).context("max_position_embeddings is too large")?;
    let mut eos = spec.eos.clone();
    let mut sampling = Sampling::default();
    if let Some(generation) = checkpoint.generation() {
        let named = generation.token_ids("eos_token_id")?;
        if !named.is_empty() {
            eos = named;
        }
        sampling = sampling_defaults(generation)?;
    }
    Ok(Served {
        card: ModelCard { id: name.to_string(), created, context },
        space: KeySpace::new(Fingerprint(model.fingerprint()), model.dtype()),
        vocab: spec.vocab,
        compose: model.default_compose(),
        eos: eos.into(),
        sampling,
    })
}

/// What `generation_config.json` says of sampling; `do_sample: false` is greedy.
fn sampling_defaults(generation: &Config) -> Result<Sampling> {
    let number = |key: &str| generation.opt_f64(key).map(|n| n.map(|n| n as f32));
    let greedy = generation.opt_bool("do_sample")? == Some(false);
    let sampling = Sampling {
        temperature: if greedy { Some(0.0) } else { number("temperature")? },
        top_k: generation.opt_usize("top_k")?.map(|k| u32::try_from(k).unwrap_or(0)),
        top_p: number("top_p")?,
        min_p: number("min_p")?,
        repetition_penalty: number("repetition_penalty")?,
        ..Sampling::default()
    };
    let ordinary = SamplingParams::default();
    let resolved = SamplingParams {
        temperature: sampling.temperature.unwrap_or(ordinary.temperature),
        top_p: sampling.top_p.unwrap_or(ordinary.top_p),
        min_p: sampling.min_p.unwrap_or(ordinary.min_p),
        repetition_penalty: sampling.repetition_penalty.unwrap_or(ordinary.repetition_penalty),
        ..ordinary
    };
    resolved.validate().map_err(|e| generation.wrong(e.field, e.message))?;
    Ok(sampling)
}
