//! The CPU backend: f32 activations, weights packed at load (f32 or bf16), SIMD chosen at run time.
//!
//! Work is split over threads of its own, never so that a result depends on the split.

mod attention;
mod conv;
mod experts;
mod heads;
mod isa;
mod kv;
mod linear;
mod math;
mod matmul;
mod pool;
mod rope;
mod rows;
mod scan;
mod tensor;
#[cfg(test)]
mod testing;

use std::ops::Range;

use hypic_state::{DType, HostKv, HostTensor, Storage, Transition};

use crate::{
    Activation, AttentionRows, AttentionShape, Backend, Cols, ConvFold, Expert, Fold, Form, GatedNorm, HeadCols,
    KvShape, MlpForm, Positions, RopeSpec, RouteSpec, ScanInputs, ScanShape,
};

pub use experts::CpuRouting;
pub use isa::Isa;
pub use kv::{CpuKv, KEY_BLOCK};
pub use linear::CpuLinear;
pub use rope::CpuRope;
pub use scan::CpuCarry;
pub use tensor::CpuTensor;

use pool::Pool;

/// A share of this machine's cores.
#[derive(Clone)]
pub struct Cpu {
    isa: Isa,
    pool: Pool,
}

impl Cpu {
    /// A backend with `threads` threads of its own and the best instruction set that the CPU has.
    pub fn new(threads: usize) -> Self {
        Self::with_isa(threads, Isa::best())
    }

    /// The same with a given instruction set.
    ///
    /// # Panics
    /// If the CPU lacks it.
    pub fn with_isa(threads: usize, isa: Isa) -> Self {
        assert!(isa.available(), "this CPU has no {isa:?}");
        Cpu { isa, pool: Pool::new(threads) }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }
}

impl Storage for Cpu {
    type Tensor = CpuTensor;
    type Kv = CpuKv;
}

impl Backend for Cpu {
    type Linear = CpuLinear;
    type Rope = CpuRope;
    type Carry = CpuCarry;
    type Routing = CpuRouting;

    fn kernel_set(&self) -> String {
        self.isa.kernel_set().to_string()
    }

    fn supports(&self, dtype: DType) -> bool {
        match dtype {
            DType::F32 => true,
            // Where the CPU has bf16 products, models in bf16 are served so, even if widened weights are faster.
            DType::Bf16 => matches!(self.isa, Isa::Avx512Bf16 | Isa::Avx512) && Isa::Avx512Bf16.available(),
            DType::F16 | DType::F64 => false,
        }
    }

    fn alloc(&self, shape: &[usize]) -> CpuTensor {
        CpuTensor::alloc(shape)
    }

    fn zeros(&self, shape: &[usize]) -> CpuTensor {
        CpuTensor::zeros(shape)
    }

    fn resize(&self, t: &mut CpuTensor, shape: &[usize]) {
        t.resize(shape);
    }

    fn upload(&self, t: &HostTensor) -> CpuTensor {
        CpuTensor::upload(t)
    }

    fn download(&self, t: &CpuTensor) -> HostTensor {
        t.download()
    }

    fn duplicate(&self, t: &CpuTensor) -> CpuTensor {
        t.clone()
    }

    fn pack(&self, parts: &[HostTensor], dtype: DType) -> CpuLinear {
        CpuLinear::pack(parts, dtype)
    }

    fn linear(&self, w: &CpuLinear, x: &CpuTensor, out: &mut CpuTensor) {
        linear::linear(self.isa, &self.pool, w, x, out, false);
    }

    fn linear_add(&self, w: &CpuLinear, x: &CpuTensor, acc: &mut CpuTensor) {
        linear::linear(self.isa, &self.pool, w, x, acc, true);
    }

    fn embed(&self, w: &CpuLinear, ids: &[u32], out: &mut CpuTensor) {
        linear::embed(w, ids, out);
    }

    fn gather(&self, x: &CpuTensor, index: &[usize], out: &mut CpuTensor) {
        rows::gather(x, index, out);
    }

    fn rms_norm(&self, x: &CpuTensor, weight: &CpuTensor, eps: f32, out: &mut CpuTensor) {
        rows::rms_norm(self.isa, &self.pool, x, weight, eps, out);
    }

    fn head_norm(&self, x: &mut CpuTensor, col: usize, heads: usize, weight: &CpuTensor, eps: f32) {
        rows::head_norm(self.isa, &self.pool, x, col, heads, weight, eps);
    }

    fn mlp_inner(&self, form: MlpForm, x: &CpuTensor, out: &mut CpuTensor) {
        rows::mlp_inner(self.isa, &self.pool, form, x, out);
    }

    fn gate(&self, x: &mut CpuTensor, g: Cols<'_, Self>, width: usize, activation: Activation) {
        rows::gate(self.isa, &self.pool, x, g, width, activation);
    }

    fn activate(&self, x: &mut CpuTensor, cols: Range<usize>, activation: Activation) {
        rows::activate(self.isa, &self.pool, x, cols, activation);
    }

    fn mix(&self, acc: &mut CpuTensor, a: f32, x: &CpuTensor, b: f32) {
        rows::mix(self.isa, &self.pool, acc, a, x, b);
    }

    fn copy_heads(
        &self,
        from: &CpuTensor,
        at_from: HeadCols,
        heads: usize,
        width: usize,
        to: &mut CpuTensor,
        at_to: HeadCols,
    ) {
        heads::copy(&self.pool, from, at_from, heads, width, to, at_to);
    }

    fn head_linear(&self, ws: &[CpuLinear], x: &CpuTensor, at_x: HeadCols, out: &mut CpuTensor, at_out: HeadCols) {
        heads::linear(self.isa, &self.pool, ws, x, at_x, out, at_out);
    }

    fn rotate(
        &self,
        x: &mut CpuTensor,
        col: usize,
        heads: usize,
        d: usize,
        positions: &[Positions<'_>],
        rope: &CpuRope,
    ) {
        heads::rotate(self.isa, &self.pool, x, col, heads, d, positions, rope);
    }

    fn routing(&self) -> CpuRouting {
        CpuRouting::default()
    }

    fn route(&self, spec: &RouteSpec, logits: &CpuTensor, bias: Option<&CpuTensor>, routing: &mut CpuRouting) {
        experts::route(self.isa, &self.pool, spec, logits, bias, routing);
    }

    fn experts(
        &self,
        form: MlpForm,
        experts: &[Expert<Self>],
        routing: &CpuRouting,
        x: &CpuTensor,
        acc: &mut CpuTensor,
    ) {
        experts::experts(self.isa, &self.pool, form, experts, routing, x, acc);
    }

    fn conv(
        &self,
        x: Cols<'_, Self>,
        weight: &CpuTensor,
        bias: Option<&CpuTensor>,
        folds: &mut [ConvFold<'_, Self>],
        out: &mut CpuTensor,
    ) {
        conv::conv(self.isa, &self.pool, x, weight, bias, folds, out);
    }

    fn scan(&self, shape: ScanShape, inputs: ScanInputs<'_, Self>, folds: &mut [Fold<'_, Self>], out: &mut CpuTensor) {
        scan::scan(self.isa, &self.pool, shape, inputs, folds, out);
    }

    fn carry(&self, shape: ScanShape, form: Form) -> CpuCarry {
        CpuCarry::new(shape, form)
    }

    fn finish(&self, carry: CpuCarry, state: &CpuTensor) -> (Transition<CpuTensor>, CpuTensor) {
        scan::finish(self.isa, &self.pool, carry, state)
    }

    fn gated_norm(&self, spec: GatedNorm, o: &CpuTensor, weight: &CpuTensor, g: Cols<'_, Self>, out: &mut CpuTensor) {
        rows::gated_norm(self.isa, &self.pool, spec, o, weight, g, out);
    }

    fn rope(&self, spec: &RopeSpec) -> CpuRope {
        CpuRope::new(spec)
    }

    fn kv(&self, shape: KvShape) -> CpuKv {
        CpuKv::new(shape)
    }

    fn kv_shape(&self, kv: &CpuKv) -> KvShape {
        kv.shape()
    }

    fn kv_len(&self, kv: &CpuKv) -> usize {
        kv.len()
    }

    fn kv_append(
        &self,
        kv: &mut CpuKv,
        rows: Range<usize>,
        k: Cols<'_, Self>,
        v: Option<Cols<'_, Self>>,
        positions: Positions<'_>,
        rope: Option<&CpuRope>,
    ) {
        kv.append(rows, k, v, positions, rope);
    }

    fn kv_copy(&self, kv: &CpuKv, range: Range<usize>) -> CpuKv {
        kv.copy(range)
    }

    fn kv_truncate(&self, kv: &mut CpuKv, len: usize) {
        kv.truncate(len);
    }

    fn kv_download(&self, kv: &CpuKv) -> HostKv {
        kv.download()
    }

    fn kv_upload(&self, kv: &HostKv, shape: KvShape) -> CpuKv {
        CpuKv::upload(kv, shape)
    }

    fn attention(
        &self,
        shape: AttentionShape,
        rope: Option<&CpuRope>,
        q: Cols<'_, Self>,
        sequences: &[AttentionRows<'_, Self>],
        out: &mut CpuTensor,
    ) {
        attention::attention(self.isa, &self.pool, shape, rope, q, sequences, out);
    }
}
