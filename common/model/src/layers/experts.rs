//! Mixture of experts. Routing is discontinuous: logits that differ in the last bit can choose another expert, so the
//! router is computed in f32 whatever the model's dtype, and its logits depend on nothing but their row.

use hypic_kernels::{Backend, DeviceTensor, Expert, MlpForm, RouteSpec};
use hypic_state::DType;

use super::{Loader, Mlp, Scratch, Sum};
use crate::ModelError;
use crate::spec::{ExpertsSpec, MlpSpec};

/// Experts, a few of which serve a row, and one that serves every row.
pub(crate) struct Experts<B: Backend> {
    route: RouteSpec,
    /// `[experts, hidden]`, always in f32: rounded logits would choose other experts.
    router: B::Linear,
    bias: Option<B::Tensor>,
    /// To the columns that the experts work on, and back.
    narrow: Option<[B::Linear; 2]>,
    form: MlpForm,
    experts: Vec<Expert<B>>,
    shared: Option<Mlp<B>>,
    shared_gate: Option<B::Linear>,
}

impl<B: Backend> Experts<B> {
    pub fn load(loader: &mut Loader<'_, B>, spec: &ExpertsSpec, hidden: usize) -> Result<Self, ModelError> {
        let stacked = spec.fused.as_ref().filter(|f| f.first().is_some_and(|e| loader.checkpoint.has(&e.down.name)));
        let experts = stacked.unwrap_or(&spec.experts);
        debug_assert_eq!(experts.len(), spec.route.experts, "a description has every expert");
        let form = experts.first().map_or(MlpForm::SwiGlu, |expert| expert.form);
        debug_assert!(experts.iter().all(|expert| expert.form == form), "experts are of one form");
        let width = spec.narrow.as_ref().map_or(hidden, |[down, _]| down.rows());
        let narrow = match &spec.narrow {
            Some([down, up]) => Some([loader.linear([down], hidden)?, loader.linear([up], width)?]),
            None => None,
        };
        Ok(Experts {
            narrow,
            form,
            route: spec.route,
            router: loader.linear_in([&spec.router], hidden, DType::F32)?,
            bias: spec.bias.as_ref().map(|name| loader.tensor(name, &[spec.route.experts])).transpose()?,
            experts: experts.iter().map(|e| expert(loader, e, width)).collect::<Result<_, _>>()?,
            shared: spec.shared.as_ref().map(|s| Mlp::load(loader, s, hidden)).transpose()?,
            shared_gate: match &spec.shared_gate {
                Some(gate) => Some(loader.linear_in([gate], hidden, DType::F32)?),
                None => None,
            },
        })
    }

    pub fn forward(&self, backend: &B, x: &B::Tensor, scratch: &mut Scratch<B>, mut sum: Sum<'_, B>) {
        if let Some(shared) = &self.shared {
            shared.forward(backend, x, scratch, self.shared_gate.as_ref(), &mut sum);
        }
        let Scratch { logits, routing, narrow, wide, .. } = scratch;
        backend.linear(&self.router, x, logits);
        backend.route(&self.route, logits, self.bias.as_ref(), routing);
        let Some([down, up]) = &self.narrow else {
            return backend.experts(self.form, &self.experts, routing, x, sum.so_far(x));
        };
        backend.linear(down, x, narrow);
        backend.resize(wide, narrow.shape());
        backend.mix(wide, 0.0, narrow, 0.0);
        backend.experts(self.form, &self.experts, routing, narrow, wide);
        sum.linear(up, wide);
    }
}

fn expert<B: Backend>(loader: &mut Loader<'_, B>, spec: &MlpSpec, width: usize) -> Result<Expert<B>, ModelError> {
    Ok(Expert { gate_up: loader.linear(&spec.gate_up, width)?, down: loader.linear([&spec.down], spec.inner)? })
}
