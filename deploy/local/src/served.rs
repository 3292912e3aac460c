//! What roles know of the model that they serve. Owns how it is read from a checkpoint: the dtype of the computation, end
//! tokens, and sampling. A setting that cannot be is refused with its file and name.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use hypic_cache::{Fingerprint, KeySpace};
use hypic_kernels::{Backend, Cpu};
use hypic_model::{Checkpoint, Config, LoadOptions, Model, ModelSpec};
use hypic_router::{ModelCard, Sampling, Served};
use hypic_state::DType;
use hypic_text::TextPipeline;
use hypic_transport::SamplingParams;

use crate::dtype::ComputeDType;

/// The dtype to compute in: the one asked for, or the checkpoint's where the CPU has instructions for it, else f32.
pub(crate) fn compute_dtype(device: &Cpu, checkpoint: &Checkpoint, asked: ComputeDType) -> DType {
    let own = || checkpoint.dtype().filter(|&d| device.supports(d));
    asked.asked().or_else(own).unwrap_or(DType::F32)
}

/// Load the model, and tell what of it is not served. `progress` is told the name of each tensor that has been read.
pub(crate) fn load_model(
    device: &Cpu,
    checkpoint: &Checkpoint,
    asked: ComputeDType,
    progress: &dyn Fn(&str),
) -> Result<Model<Cpu>> {
    let dtype = compute_dtype(device, checkpoint, asked);
    let model = Model::load(device, checkpoint, LoadOptions { dtype, progress })?;
    for prefix in model.ignored() {
        tracing::info!(prefix, "the checkpoint's tensors of this prefix are not served");
    }
    Ok(model)
}

/// Whether a tokenizer can belong to the model.
pub(crate) fn check_tokenizer(text: Option<&TextPipeline>, spec: &ModelSpec) -> Result<()> {
    let (ids, rows) = (text.map_or(0, |text| text.tokenizer().vocab_size()), spec.vocab);
    if ids <= rows {
        return Ok(());
    }
    bail!("tokenizer.json has {ids} token ids but the model's embedding has {rows} rows: they do not belong together")
}

/// What a router is told of the model.
pub(crate) fn served(
    name: String,
    spec: &ModelSpec,
    fingerprint: [u8; 32],
    dtype: DType,
    checkpoint: &Checkpoint,
) -> Result<Served> {
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
        card: ModelCard { id: name, created, context },
        space: KeySpace::new(Fingerprint(fingerprint), dtype),
        vocab: spec.vocab,
        reusable: spec.reusable(),
        compose: spec.compose,
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
