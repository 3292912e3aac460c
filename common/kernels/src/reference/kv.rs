//! Stores of keys and values, and rotary embeddings. Keys are rotated when they are appended; what a store holds
//! is rounded to its dtype. Where values are shared, a store holds keys alone.

use std::marker::PhantomData;
use std::ops::Range;

use hypic_state::{DType, HostKv, HostTensor, Stored};

use super::real::Real;
use super::{Columns, check};
use crate::{KvShape, Positions, RopeSpec};

/// Keys and values, a row a token, their values rounded to the store's dtype.
#[derive(Clone, Debug)]
pub struct RefKv<R> {
    pub(super) shape: KvShape,
    k: Vec<R>,
    v: Vec<R>,
}

impl<R: Real> RefKv<R> {
    pub(super) fn new(shape: KvShape) -> Self {
        RefKv { shape: shape.stored(), k: Vec::new(), v: Vec::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.k.len() / (self.shape.heads * self.shape.d_k)
    }

    pub(super) fn key(&self, token: usize, head: usize) -> &[R] {
        let KvShape { heads, d_k, .. } = self.shape;
        &self.k[(token * heads + head) * d_k..][..d_k]
    }

    /// A value of `d_v` numbers: of a key's, where they are shared.
    pub(super) fn value(&self, token: usize, head: usize, d_v: usize) -> &[R] {
        if self.shape.shared {
            return &self.key(token, head)[..d_v];
        }
        &self.v[(token * self.shape.heads + head) * d_v..][..d_v]
    }

    pub(super) fn append(
        &mut self,
        rows: Range<usize>,
        k: Columns<'_, R>,
        v: Option<Columns<'_, R>>,
        positions: Positions<'_>,
        rope: Option<&RefRope<R>>,
    ) {
        check::range("kv_append", "rows of k", &rows, k.mat.shape[0]);
        if let Some(v) = v {
            check::range("kv_append", "rows of v", &rows, v.mat.shape[0]);
        }
        assert_eq!(v.is_none(), self.shape.shared, "kv_append: values are given if and only if they are not shared");
        let Positions { at, ntk_alpha } = positions;
        assert_eq!(at.len(), rows.len(), "kv_append: {} positions for rows {rows:?}", at.len());
        let rope = rope.map(|rope| rope.ntk(ntk_alpha));
        let KvShape { d_k, dtype, .. } = self.shape;
        for (row, &position) in rows.zip(at) {
            for key in k.row(row).chunks(d_k) {
                let mut key = key.to_vec();
                if let Some(rope) = &rope {
                    rope.rotate(&mut key, position);
                }
                self.k.extend(key.into_iter().map(|x| x.round_to(dtype)));
            }
            self.v.extend(v.into_iter().flat_map(|v| v.row(row)).map(|x| x.round_to(dtype)));
        }
    }

    pub(super) fn copy(&self, range: Range<usize>) -> Self {
        check::range("kv_copy", "range", &range, self.len());
        let KvShape { heads, d_k, d_v, .. } = self.shape;
        RefKv {
            shape: self.shape,
            k: self.k[range.start * heads * d_k..range.end * heads * d_k].to_vec(),
            v: self.v[range.start * heads * d_v..range.end * heads * d_v].to_vec(),
        }
    }

    pub(super) fn truncate(&mut self, len: usize) {
        assert!(len <= self.len(), "kv_truncate: {len} tokens of {}", self.len());
        let KvShape { heads, d_k, d_v, .. } = self.shape;
        self.k.truncate(len * heads * d_k);
        self.v.truncate(len * heads * d_v);
    }

    pub(super) fn download(&self) -> HostKv {
        let KvShape { heads, d_k, d_v, dtype, .. } = self.shape;
        let host = |d: usize, values: &[R]| {
            let shape = [self.len(), heads, d];
            // Values are already rounded to the dtype, so narrowing them again loses nothing.
            let narrow = || values.iter().map(|x| x.to_f64() as f32).collect::<Vec<_>>();
            match dtype {
                DType::F64 => R::host(&shape, values),
                DType::Bf16 => HostTensor::from_f32_as_bf16(shape, &narrow()),
                DType::F32 | DType::F16 => HostTensor::from_f32(shape, &narrow()),
            }
        };
        HostKv { k: host(d_k, &self.k), v: host(d_v, &self.v) }
    }

    pub(super) fn upload(kv: &HostKv, shape: KvShape) -> Self {
        let shape = shape.stored();
        let KvShape { heads, d_k, d_v, dtype, .. } = shape;
        let tokens = kv.k.shape().first().copied().unwrap_or(0);
        let read = |name: &str, t: &HostTensor, d: usize| {
            let want = [tokens, heads, d];
            assert_eq!(t.shape(), want, "kv_upload: {name} has shape {:?}, needs {want:?}", t.shape());
            R::read(t).into_iter().map(|x| x.round_to(dtype)).collect()
        };
        RefKv { shape, k: read("k", &kv.k, d_k), v: read("v", &kv.v, d_v) }
    }
}

impl<R: Real> Stored for RefKv<R> {
    fn bytes(&self) -> usize {
        (self.k.len() + self.v.len()) * size_of::<R>()
    }
}

/// A rotary embedding; angles are computed in f64 from the exact position.
#[derive(Clone, Debug)]
pub struct RefRope<R> {
    pub(super) spec: RopeSpec,
    /// Frequencies at the own position, which may be stretched.
    own: Vec<f64>,
    working: PhantomData<R>,
}

impl<R: Real> RefRope<R> {
    pub(super) fn new(spec: &RopeSpec) -> Self {
        RefRope { spec: spec.clone(), own: spec.inv_freq.clone(), working: PhantomData }
    }

    /// The same, stretched: see [`RopeSpec::ntk`].
    pub(super) fn ntk(&self, alpha: f64) -> Self {
        RefRope { own: self.spec.ntk(alpha).inv_freq, ..self.clone() }
    }

    /// A head of `d` numbers must have the dimensions that turn.
    pub(super) fn check(&self, op: &str, d: usize) {
        let RopeSpec { offset, inv_freq, .. } = &self.spec;
        let pairs = inv_freq.len();
        assert!(offset + 2 * pairs <= d, "{op}: {pairs} pairs from dimension {offset} of a head of {d}");
    }

    /// Turn the head `x` to `position`.
    pub(super) fn rotate(&self, x: &mut [R], position: i64) {
        self.rotate_from(x, position, 0);
    }

    /// Turn the head `x` to `position`, as seen from `origin`, which is not stretched.
    pub(super) fn rotate_from(&self, x: &mut [R], position: i64, origin: i64) {
        let RopeSpec { offset, inv_freq, interleaved, scale } = &self.spec;
        let pairs = inv_freq.len();
        self.check("rope", x.len());
        for (i, freq) in inv_freq.iter().enumerate() {
            let (first, second) =
                if *interleaved { (offset + 2 * i, offset + 2 * i + 1) } else { (offset + i, offset + i + pairs) };
            let angle = if self.own[i] == *freq {
                (position - origin) as f64 * freq
            } else {
                position as f64 * self.own[i] - origin as f64 * freq
            };
            let (sin, cos) = angle.sin_cos();
            let (sin, cos) = (R::from_f64(sin * scale), R::from_f64(cos * scale));
            let (a, b) = (x[first], x[second]);
            x[first] = a * cos - b * sin;
            x[second] = b * cos + a * sin;
        }
    }
}
