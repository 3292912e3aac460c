//! A loaded model: weights on a device, ready for passes.

use std::sync::Arc;

use hypic_kernels::Backend;
use hypic_state::{ComposeRule, DType, EntryLayout};

use crate::layers::{Attention, GatedDelta, Layer, Loader, Mixer, Mlp, Norm};
use crate::spec::{MixerSpec, ModelSpec, RowSource};
use crate::{Checkpoint, ModelError, families};

/// How a checkpoint is brought to a device.
pub struct LoadOptions<'a> {
    /// Dtype in which linear layers are computed and K and V are kept. States, operators and softmax
    /// are always in the backend's working precision.
    pub dtype: DType,
    /// Told the name of each tensor that has been read.
    pub progress: &'a dyn Fn(&str),
}

/// A model on a device. Cloning shares the weights.
pub struct Model<B: Backend> {
    inner: Arc<Inner<B>>,
}

impl<B: Backend> Clone for Model<B> {
    fn clone(&self) -> Self {
        Model { inner: self.inner.clone() }
    }
}

struct Inner<B: Backend> {
    spec: ModelSpec,
    layout: EntryLayout,
    embed: Arc<B::Linear>,
    layers: Vec<Layer<B>>,
    final_norm: Norm<B>,
    head: Arc<B::Linear>,
    weight_bytes: usize,
    ignored: Vec<String>,
    fingerprint: [u8; 32],
    dtype: DType,
}

impl<B: Backend> Model<B> {
    /// Load a checkpoint.
    ///
    /// # Errors
    /// If the configuration is wrong or unsupported, or the weights do not fit it exactly.
    pub fn load(backend: &B, checkpoint: &Checkpoint, options: LoadOptions<'_>) -> Result<Self, ModelError> {
        let spec = families::describe(checkpoint.config())?;
        // Float64 is the reference's working precision: weights stay as they are, K and V are not rounded.
        let (dtype, kv_dtype) = match options.dtype {
            DType::F64 => (DType::F32, DType::F64),
            other => (other, other),
        };
        let mut loader = Loader { backend, checkpoint, dtype, progress: options.progress, bytes: 0 };
        let vocabulary = |name: &str| [RowSource::all(name, spec.vocab)];
        let embed = Arc::new(loader.linear(&vocabulary(&spec.embed), spec.hidden)?);
        let head = match &spec.head {
            Some(name) if !checkpoint.has(name) => return Err(lacks_head(name, &spec)),
            Some(name) => Arc::new(loader.linear(&vocabulary(name), spec.hidden)?),
            None => embed.clone(),
        };
        check_tied_head(checkpoint, &spec)?;
        let final_norm = loader.norm(&spec.final_norm)?;
        let mut layers = Vec::with_capacity(spec.layers.len());
        for layer in &spec.layers {
            layers.push(Layer {
                mixer_norm: loader.norm(&layer.mixer_norm)?,
                mixer: match &layer.mixer {
                    MixerSpec::GatedDelta(s) => Mixer::GatedDelta(GatedDelta::load(&mut loader, s, spec.hidden)?),
                    MixerSpec::Attention(s) => {
                        Mixer::Attention(Attention::load(&mut loader, s, spec.hidden, kv_dtype)?)
                    }
                },
                mlp_norm: loader.norm(&layer.mlp_norm)?,
                mlp: Mlp::load(&mut loader, &layer.mlp, spec.hidden)?,
            });
        }
        let weight_bytes = loader.bytes;
        let ignored = checkpoint.check_all_used(&spec.ignored)?;
        let inner = Inner {
            layout: spec.layout(),
            spec,
            embed,
            layers,
            final_norm,
            head,
            weight_bytes,
            ignored,
            fingerprint: checkpoint.fingerprint()?,
            dtype: options.dtype,
        };
        Ok(Model { inner: Arc::new(inner) })
    }

    /// The description it was loaded by.
    pub fn spec(&self) -> &ModelSpec {
        &self.inner.spec
    }

    /// Which parts its entries have.
    pub fn layout(&self) -> &EntryLayout {
        &self.inner.layout
    }

    /// Dtype in which it computes.
    pub fn dtype(&self) -> DType {
        self.inner.dtype
    }

    /// Fingerprint of the checkpoint: see [`Checkpoint::fingerprint`].
    pub fn fingerprint(&self) -> [u8; 32] {
        self.inner.fingerprint
    }

    /// Bytes of the weights on the device.
    pub fn weight_bytes(&self) -> usize {
        self.inner.weight_bytes
    }

    /// Prefixes of tensors that the checkpoint has and the engine does not serve.
    pub fn ignored(&self) -> &[String] {
        &self.inner.ignored
    }

    /// Rule of composition unless a request names one.
    pub fn default_compose(&self) -> ComposeRule {
        self.inner.spec.compose
    }

    pub(crate) fn layers(&self) -> &[Layer<B>] {
        &self.inner.layers
    }

    pub(crate) fn embedding(&self) -> &B::Linear {
        &self.inner.embed
    }

    pub(crate) fn head(&self) -> &B::Linear {
        &self.inner.head
    }

    pub(crate) fn final_norm(&self) -> &Norm<B> {
        &self.inner.final_norm
    }
}

fn lacks_head(name: &str, spec: &ModelSpec) -> ModelError {
    let problem = format!(
        "lacks tensor {name}, expected with shape {:?}: without one, config.json needs \"tie_word_embeddings\": true",
        [spec.vocab, spec.hidden]
    );
    ModelError::checkpoint("weights", problem)
}

/// A head tensor beside a tied head must say the same as the embedding.
fn check_tied_head(checkpoint: &Checkpoint, spec: &ModelSpec) -> Result<(), ModelError> {
    let Some((name, file)) = spec.tied_head.as_ref().and_then(|name| Some((name, checkpoint.file_of(name)?))) else {
        return Ok(());
    };
    let shape = [spec.vocab, spec.hidden];
    let (head, embed) = (checkpoint.tensor(name, &shape)?, checkpoint.tensor(&spec.embed, &shape)?);
    // Bytes first: NaN is not equal to itself.
    if head == embed || (head.dtype() != embed.dtype() && head.to_f32() == embed.to_f32()) {
        return Ok(());
    }
    let problem = format!(
        "tensor {name} differs from {}, but config.json has tie_word_embeddings: set it to false to use {name}",
        spec.embed
    );
    Err(ModelError::checkpoint(file, problem))
}
