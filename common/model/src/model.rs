//! A loaded model: weights on a device, ready for passes.

use std::collections::BTreeSet;
use std::sync::Arc;

use hypic_kernels::{Backend, DeviceTensor};
use hypic_state::{ComposeRule, DType, EntryLayout};

use crate::layers::{Layer, Loader, Norm, Workspace};
use crate::spec::{ModelSpec, RowSource};
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
    /// Load a checkpoint: a matrix at a time, so that little more main memory is needed than the device's weights take.
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
        let mut loader = Loader {
            backend,
            checkpoint,
            dtype,
            progress: options.progress,
            bytes: 0,
            told: BTreeSet::new(),
            ropes: Vec::new(),
            other_decays: false,
        };
        let vocabulary = |name: &str| RowSource::all(name, spec.vocab);
        let embed = Arc::new(loader.linear([&vocabulary(&spec.embed)], spec.hidden)?);
        let head = match &spec.head {
            Some(name) if !checkpoint.has(name) => return Err(lacks_head(name, &spec)),
            Some(name) => Arc::new(loader.linear([&vocabulary(name)], spec.hidden)?),
            None => embed.clone(),
        };
        check_tied_head(checkpoint, &spec)?;
        let final_norm = loader.norm(&spec.final_norm)?;
        let mut layers = Vec::with_capacity(spec.layers.len());
        for layer in &spec.layers {
            layers.push(Layer::load(&mut loader, layer, spec.hidden, kv_dtype)?);
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

    /// `x [ids, hidden]`: the residual stream before the first layer.
    pub fn embed(&self, backend: &B, ids: &[u32], ws: &mut Workspace<B>, x: &mut B::Tensor) {
        let scale = self.inner.spec.embed_scale;
        if scale == 1.0 {
            return backend.embed(&self.inner.embed, ids, x);
        }
        backend.embed(&self.inner.embed, ids, &mut ws.normed);
        backend.resize(x, ws.normed.shape());
        backend.mix(x, 0.0, &ws.normed, scale);
    }

    /// `out [rows, hidden]`: what the head sees of the residual stream behind the last layer.
    pub fn final_norm(&self, backend: &B, x: &B::Tensor, out: &mut B::Tensor) {
        let norm = &self.inner.final_norm;
        backend.rms_norm(x, &norm.weight, norm.eps, out);
    }

    /// `[rows, vocab]`: the logits of the chosen rows.
    pub(crate) fn logits(&self, backend: &B, ws: &mut Workspace<B>) -> B::Tensor {
        let Workspace { normed, branch, chosen, .. } = ws;
        let scale = self.inner.spec.logit_scale;
        self.final_norm(backend, chosen, normed);
        let mut logits = backend.alloc(&[chosen.rows(), self.inner.spec.vocab]);
        if scale == 1.0 {
            backend.linear(&self.inner.head, normed, &mut logits);
            return logits;
        }
        backend.resize(branch, normed.shape());
        backend.mix(branch, 0.0, normed, scale);
        backend.linear(&self.inner.head, branch, &mut logits);
        logits
    }
}

fn lacks_head(name: &str, spec: &ModelSpec) -> ModelError {
    let problem = format!(
        "lacks tensor {name}, expected with shape {:?}: without one, config.json needs \"tie_word_embeddings\": true",
        [spec.vocab, spec.hidden]
    );
    ModelError::checkpoint("weights", problem)
}

/// A head tensor beside a tied head must say the same as the embedding. Both are read some rows at a time.
fn check_tied_head(checkpoint: &Checkpoint, spec: &ModelSpec) -> Result<(), ModelError> {
    const ROWS: usize = 1024;
    let Some((name, file)) = spec.tied_head.as_ref().and_then(|name| Some((name, checkpoint.file_of(name)?))) else {
        return Ok(());
    };
    let shape = [spec.vocab, spec.hidden];
    for first in (0..spec.vocab).step_by(ROWS) {
        let rows = first..spec.vocab.min(first + ROWS);
        let head = checkpoint.rows(name, shape, rows.clone())?;
        let embed = checkpoint.rows(&spec.embed, shape, rows)?;
        // Bytes first: NaN is not equal to itself.
        if head == embed || (head.dtype() != embed.dtype() && head.to_f32() == embed.to_f32()) {
            continue;
        }
        let problem = format!(
            "tensor {name} differs from {}, but config.json has tie_word_embeddings: set it to false to use {name}",
            spec.embed
        );
        return Err(ModelError::checkpoint(file, problem));
    }
    Ok(())
}
