//! The scalar backend that the others are compared with: f64, or f32, one thread, no packing, every op by its
//! definition.
//!
//! It owns nothing but its tensors and is slow. In f64 its results are good to about 1e-13 of the largest
//! value. A mismatch of shapes panics with the op, the argument and the shapes.

mod attention;
mod check;
mod conv;
mod experts;
mod kv;
mod linear;
mod real;
mod rows;
mod scan;
mod tensor;

use std::marker::PhantomData;
use std::ops::Range;

use hypic_state::{DType, HostKv, HostTensor, Storage, Transition};

use crate::{
    Activation, AttentionRows, AttentionShape, Backend, Cols, ConvFold, DeviceTensor, Expert, Fold, Form, GatedNorm,
    HeadCols, KvShape, MlpForm, Positions, RopeSpec, RouteSpec, ScanInputs, ScanShape,
};

pub use experts::RefRouting;
pub use kv::{RefKv, RefRope};
pub use linear::RefLinear;
pub use real::Real;
pub use scan::RefCarry;
pub use tensor::RefTensor;

/// The scalar backend in working precision `R`: f64 or f32.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference<R: Real>(PhantomData<R>);

impl<R: Real> Reference<R> {
    /// A backend.
    pub fn new() -> Self {
        Reference(PhantomData)
    }
}

/// Some columns of a matrix.
#[derive(Clone, Copy)]
struct Columns<'a, R: Real> {
    mat: &'a RefTensor<R>,
    col: usize,
    width: usize,
}

impl<'a, R: Real> Columns<'a, R> {
    fn row(&self, i: usize) -> &'a [R] {
        &self.mat.row(i)[self.col..self.col + self.width]
    }
}

impl<R: Real> Storage for Reference<R> {
    type Tensor = RefTensor<R>;
    type Kv = RefKv<R>;
}

impl<R: Real> Backend for Reference<R> {
    type Linear = RefLinear<R>;
    type Rope = RefRope<R>;
    type Carry = RefCarry<R>;
    type Routing = RefRouting<R>;

    fn kernel_set(&self) -> String {
        format!("reference-{}-v1", R::DTYPE)
    }

    fn supports(&self, dtype: DType) -> bool {
        dtype == DType::F32 || dtype == R::DTYPE
    }

    fn alloc(&self, shape: &[usize]) -> RefTensor<R> {
        RefTensor::alloc(shape)
    }

    fn zeros(&self, shape: &[usize]) -> RefTensor<R> {
        RefTensor::filled(shape, R::ZERO)
    }

    fn resize(&self, t: &mut RefTensor<R>, shape: &[usize]) {
        t.resize(shape);
    }

    fn upload(&self, t: &HostTensor) -> RefTensor<R> {
        RefTensor::upload(t)
    }

    fn download(&self, t: &RefTensor<R>) -> HostTensor {
        t.download()
    }

    fn duplicate(&self, t: &RefTensor<R>) -> RefTensor<R> {
        t.clone()
    }

    fn pack(&self, parts: &[HostTensor], dtype: DType) -> RefLinear<R> {
        RefLinear::pack(parts, dtype)
    }

    fn linear(&self, w: &RefLinear<R>, x: &RefTensor<R>, out: &mut RefTensor<R>) {
        w.linear(x, out);
    }

    fn linear_add(&self, w: &RefLinear<R>, x: &RefTensor<R>, acc: &mut RefTensor<R>) {
        w.linear_add(x, acc);
    }

    fn embed(&self, w: &RefLinear<R>, ids: &[u32], out: &mut RefTensor<R>) {
        w.embed(ids, out);
    }

    fn gather(&self, x: &RefTensor<R>, index: &[usize], out: &mut RefTensor<R>) {
        rows::gather(x, index, out);
    }

    fn rms_norm(&self, x: &RefTensor<R>, weight: &RefTensor<R>, eps: f32, out: &mut RefTensor<R>) {
        rows::rms_norm(x, weight, eps, out);
    }

    fn head_norm(&self, x: &mut RefTensor<R>, col: usize, heads: usize, weight: &RefTensor<R>, eps: f32) {
        rows::head_norm(x, col, heads, weight, eps);
    }

    fn mlp_inner(&self, form: MlpForm, x: &RefTensor<R>, out: &mut RefTensor<R>) {
        rows::mlp_inner(form, x, out);
    }

    fn gate(&self, x: &mut RefTensor<R>, g: Cols<'_, Self>, width: usize, activation: Activation) {
        let k = x.cols();
        assert!(width > 0 && k.is_multiple_of(width), "gate: {k} columns of x in stretches of {width}");
        rows::gate(x, check::cols("gate", "g", g, k / width), width, activation);
    }

    fn activate(&self, x: &mut RefTensor<R>, cols: Range<usize>, activation: Activation) {
        rows::activate(x, cols, activation);
    }

    fn mix(&self, acc: &mut RefTensor<R>, a: f32, x: &RefTensor<R>, b: f32) {
        rows::mix(acc, a, x, b);
    }

    fn copy_heads(
        &self,
        from: &RefTensor<R>,
        at_from: HeadCols,
        heads: usize,
        width: usize,
        to: &mut RefTensor<R>,
        at_to: HeadCols,
    ) {
        rows::copy_heads(from, at_from, heads, width, to, at_to);
    }

    fn head_linear(
        &self,
        ws: &[RefLinear<R>],
        x: &RefTensor<R>,
        at_x: HeadCols,
        out: &mut RefTensor<R>,
        at_out: HeadCols,
    ) {
        linear::head_linear(ws, x, at_x, out, at_out);
    }

    fn rotate(
        &self,
        x: &mut RefTensor<R>,
        col: usize,
        heads: usize,
        d: usize,
        positions: &[Positions<'_>],
        rope: &RefRope<R>,
    ) {
        rows::rotate(x, col, heads, d, positions, rope);
    }

    fn routing(&self) -> RefRouting<R> {
        RefRouting::default()
    }

    fn route(&self, spec: &RouteSpec, logits: &RefTensor<R>, bias: Option<&RefTensor<R>>, routing: &mut RefRouting<R>) {
        experts::route(spec, logits, bias, routing);
    }

    fn experts(
        &self,
        form: MlpForm,
        experts: &[Expert<Self>],
        routing: &RefRouting<R>,
        x: &RefTensor<R>,
        acc: &mut RefTensor<R>,
    ) {
        experts::experts(form, experts, routing, x, acc);
    }

    fn conv(
        &self,
        x: Cols<'_, Self>,
        weight: &RefTensor<R>,
        bias: Option<&RefTensor<R>>,
        folds: &mut [ConvFold<'_, Self>],
        out: &mut RefTensor<R>,
    ) {
        let x = check::cols("conv", "x", x, weight.rows());
        conv::conv(x, weight, bias, folds, out);
    }

    fn scan(
        &self,
        shape: ScanShape,
        inputs: ScanInputs<'_, Self>,
        folds: &mut [Fold<'_, Self>],
        out: &mut RefTensor<R>,
    ) {
        scan::scan(shape, inputs, folds, out);
    }

    fn carry(&self, shape: ScanShape, form: Form) -> RefCarry<R> {
        RefCarry::new(shape, form)
    }

    fn finish(&self, carry: RefCarry<R>, state: &RefTensor<R>) -> (Transition<RefTensor<R>>, RefTensor<R>) {
        carry.finish(state)
    }

    fn gated_norm(
        &self,
        spec: GatedNorm,
        o: &RefTensor<R>,
        weight: &RefTensor<R>,
        g: Cols<'_, Self>,
        out: &mut RefTensor<R>,
    ) {
        let g = check::cols("gated_norm", "g", g, o.cols());
        rows::gated_norm(spec, o, weight, g, out);
    }

    fn rope(&self, spec: &RopeSpec) -> RefRope<R> {
        RefRope::new(spec)
    }

    fn kv(&self, shape: KvShape) -> RefKv<R> {
        RefKv::new(shape)
    }

    fn kv_shape(&self, kv: &RefKv<R>) -> KvShape {
        kv.shape
    }

    fn kv_len(&self, kv: &RefKv<R>) -> usize {
        kv.len()
    }

    fn kv_append(
        &self,
        kv: &mut RefKv<R>,
        rows: Range<usize>,
        k: Cols<'_, Self>,
        v: Option<Cols<'_, Self>>,
        positions: Positions<'_>,
        rope: Option<&RefRope<R>>,
    ) {
        let k = check::cols("kv_append", "k", k, kv.shape.heads * kv.shape.d_k);
        let v = v.map(|v| check::cols("kv_append", "v", v, kv.shape.heads * kv.shape.d_v));
        kv.append(rows, k, v, positions, rope);
    }

    fn kv_copy(&self, kv: &RefKv<R>, range: Range<usize>) -> RefKv<R> {
        kv.copy(range)
    }

    fn kv_truncate(&self, kv: &mut RefKv<R>, len: usize) {
        kv.truncate(len);
    }

    fn kv_download(&self, kv: &RefKv<R>) -> HostKv {
        kv.download()
    }

    fn kv_upload(&self, kv: &HostKv, shape: KvShape) -> RefKv<R> {
        RefKv::upload(kv, shape)
    }

    fn attention(
        &self,
        shape: AttentionShape,
        rope: Option<&RefRope<R>>,
        q: Cols<'_, Self>,
        sequences: &[AttentionRows<'_, Self>],
        out: &mut RefTensor<R>,
    ) {
        let q = check::cols("attention", "q", q, shape.heads * shape.kv.d_k);
        attention::attention(shape, rope, q, sequences, out);
    }
}
