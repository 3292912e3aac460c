//! K and V of one attention layer, a plane per head.
//!
//! K lies in blocks of [`GROUP`] tokens, `[block][d_k][GROUP]`, so that a product with a query has a token per
//! lane, needs no sum across lanes and has one order for any number of rows. V is `[tokens][d_v]`, or, where values are
//! shared, not there: [`Plane::values`] takes it from the keys, a block at a time, for all rows of a task together.
//! Lanes of the last block behind the last token hold finite leftovers.

use std::ops::Range;

use half::bf16;
use hypic_state::{DType, HostKv, HostTensor, Stored};

use super::matmul::{Element, GROUP};
use super::{Cpu, CpuRope, Isa};
use crate::{Cols, DeviceTensor, KvShape, Positions};

/// Tokens whose keys lie together in the CPU backend: K of an entry takes whole blocks.
pub const KEY_BLOCK: usize = GROUP;

/// K and V of a stretch of tokens, in f32 or bf16.
pub struct CpuKv {
    shape: KvShape,
    len: usize,
    planes: Planes,
}

/// The planes of all heads.
pub(super) enum Planes {
    F32(Vec<Plane<f32>>),
    Bf16(Vec<Plane<bf16>>),
}

/// K and V of one head.
#[derive(Clone, Default)]
pub(super) struct Plane<E> {
    pub k: Vec<E>,
    /// Empty where values are shared.
    pub v: Vec<E>,
}

/// The body, with `planes` of whichever type.
macro_rules! any_planes {
    ($on:expr, $planes:ident => $body:expr) => {
        match $on {
            Planes::F32($planes) => $body,
            Planes::Bf16($planes) => $body,
        }
    };
}

impl CpuKv {
    /// # Panics
    /// If the element type is neither f32 nor bf16.
    pub(super) fn new(shape: KvShape) -> Self {
        let planes = match shape.dtype {
            DType::F32 => Planes::F32(vec![Plane::default(); shape.heads]),
            DType::Bf16 => Planes::Bf16(vec![Plane::default(); shape.heads]),
            other => panic!("the CPU backend stores K and V in f32 or bf16, not in {other}"),
        };
        CpuKv { shape: shape.stored(), len: 0, planes }
    }

    /// Tokens.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn shape(&self) -> KvShape {
        self.shape
    }

    pub(super) fn planes(&self) -> &Planes {
        &self.planes
    }

    pub(super) fn append(
        &mut self,
        rows: Range<usize>,
        k: Cols<'_, Cpu>,
        v: Option<Cols<'_, Cpu>>,
        positions: Positions<'_>,
        rope: Option<&CpuRope>,
    ) {
        let KvShape { heads, d_k, d_v, shared, .. } = self.shape;
        assert_eq!(positions.at.len(), rows.len(), "kv_append takes one position per row");
        assert_eq!(v.is_none(), shared, "kv_append takes values if and only if they are not shared");
        for (name, cols, width) in [("k", Some(k), heads * d_k), ("v", v, heads * d_v)] {
            let Some(cols) = cols else { continue };
            let shape = cols.mat.shape();
            let fits = shape.len() == 2 && rows.end <= shape[0] && cols.col + width <= shape[1];
            assert!(fits, "kv_append of rows {rows:?}, {width} columns from {} on, of {name} {shape:?}", cols.col);
        }
        if let Some(rope) = rope {
            assert!(rope.needs() <= d_k, "kv_append with rotary dimensions up to {} of {d_k}", rope.needs());
        }
        let turner = rope.map(|r| r.turner_for(positions));
        let mut turned = Vec::with_capacity(heads * d_k);
        self.grow(rows.len());
        let first = self.len - rows.len();
        for (i, row) in rows.enumerate() {
            turned.clear();
            turned.extend_from_slice(&k.mat.data()[row * k.mat.cols() + k.col..][..heads * d_k]);
            if let Some(turner) = &turner {
                // Elementwise, so the same bits on all.
                turner.turn(Isa::Portable, positions.at[i], 0, d_k, &mut turned);
            }
            let v = v.map_or(&[][..], |v| &v.mat.data()[row * v.mat.cols() + v.col..][..heads * d_v]);
            self.put(first + i, &turned, v);
        }
    }

    /// The tokens `range`, in no more memory than they need.
    pub(super) fn copy(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "kv_copy of tokens {range:?} of {}", self.len);
        let KvShape { d_k, d_v, .. } = self.shape;
        let mut copy = CpuKv::new(self.shape);
        match (&self.planes, &mut copy.planes) {
            (Planes::F32(from), Planes::F32(to)) => copy_planes(from, to, &range, d_k, d_v),
            (Planes::Bf16(from), Planes::Bf16(to)) => copy_planes(from, to, &range, d_k, d_v),
            _ => unreachable!("one shape has one element type"),
        }
        copy.len = range.len();
        copy
    }

    /// Keep only the first `len` tokens.
    pub(super) fn truncate(&mut self, len: usize) {
        assert!(len <= self.len, "kv_truncate to {len} tokens of {}", self.len);
        let KvShape { d_k, d_v, .. } = self.shape;
        any_planes!(&mut self.planes, planes => for p in planes {
            p.k.truncate(len.next_multiple_of(GROUP) * d_k);
            p.v.truncate(len * d_v);
        });
        self.len = len;
    }

    pub(super) fn download(&self) -> HostKv {
        let KvShape { heads, d_k, d_v, dtype, .. } = self.shape;
        let (mut k, mut v) = (Vec::with_capacity(self.len * heads * d_k), Vec::with_capacity(self.len * heads * d_v));
        any_planes!(&self.planes, planes => for token in 0..self.len {
            for p in planes {
                k.extend((0..d_k).map(|i| p.k[key_at(token, i, d_k)].widen()));
                v.extend(p.v[token * d_v..(token + 1) * d_v].iter().map(|x| x.widen()));
            }
        });
        let host = |values: &[f32], width| match dtype {
            DType::Bf16 => HostTensor::from_f32_as_bf16([self.len, heads, width], values),
            _ => HostTensor::from_f32([self.len, heads, width], values),
        };
        HostKv { k: host(&k, d_k), v: host(&v, d_v) }
    }

    pub(super) fn upload(kv: &HostKv, shape: KvShape) -> Self {
        let KvShape { heads, d_k, d_v, .. } = shape.stored();
        let tokens = kv.k.shape().first().copied().unwrap_or(0);
        assert_eq!(kv.k.shape(), [tokens, heads, d_k], "K of kv_upload");
        assert_eq!(kv.v.shape(), [tokens, heads, d_v], "V of kv_upload");
        let (k, v) = (kv.k.to_f32(), kv.v.to_f32());
        let mut store = CpuKv::new(shape);
        store.grow(tokens);
        for token in 0..tokens {
            store.put(token, &k[token * heads * d_k..][..heads * d_k], &v[token * heads * d_v..][..heads * d_v]);
        }
        store
    }

    fn grow(&mut self, by: usize) {
        let KvShape { d_k, d_v, .. } = self.shape;
        let len = self.len + by;
        any_planes!(&mut self.planes, planes => for p in planes {
            p.k.resize(len.next_multiple_of(GROUP) * d_k, Element::narrow(0.0));
            p.v.resize(len * d_v, Element::narrow(0.0));
        });
        self.len = len;
    }

    fn put(&mut self, token: usize, k: &[f32], v: &[f32]) {
        let KvShape { d_k, d_v, .. } = self.shape;
        any_planes!(&mut self.planes, planes => for (h, p) in planes.iter_mut().enumerate() {
            let lanes = p.k[key_at(token, 0, d_k)..].iter_mut().step_by(GROUP);
            for (to, x) in lanes.zip(&k[h * d_k..(h + 1) * d_k]) {
                *to = Element::narrow(*x);
            }
            for (to, x) in p.v[token * d_v..].iter_mut().zip(&v[h * d_v..(h + 1) * d_v]) {
                *to = Element::narrow(*x);
            }
        });
    }
}

impl Stored for CpuKv {
    fn bytes(&self) -> usize {
        any_planes!(&self.planes, planes => planes.iter().map(|p| size_of_val(&p.k[..]) + size_of_val(&p.v[..])).sum())
    }
}

impl<E: Element> Plane<E> {
    /// The first `d_v` numbers of each of the keys `tokens`, row-major in `to`.
    pub(super) fn values(&self, isa: Isa, tokens: Range<usize>, d_k: usize, d_v: usize, to: &mut Vec<f32>) {
        to.resize(to.len().max(tokens.len() * d_v), 0.0);
        let mut token = tokens.start;
        while token < tokens.end {
            let lanes = token % GROUP..GROUP.min(token % GROUP + tokens.end - token);
            let keys = &self.k[token / GROUP * GROUP * d_k..][..d_v * GROUP];
            let rows = &mut to[(token - tokens.start) * d_v..][..lanes.len() * d_v];
            token += lanes.len();
            E::transpose(isa, keys, lanes, rows);
        }
    }
}

/// Where dimension `i` of a token's key lies in its plane.
fn key_at(token: usize, i: usize, d_k: usize) -> usize {
    (token / GROUP * d_k + i) * GROUP + token % GROUP
}

fn copy_planes<E: Element>(from: &[Plane<E>], to: &mut [Plane<E>], range: &Range<usize>, d_k: usize, d_v: usize) {
    let keys = range.len().next_multiple_of(GROUP) * d_k;
    for (from, to) in from.iter().zip(to) {
        to.v = from.v[range.start * d_v..range.end * d_v].to_vec();
        to.k = if range.start.is_multiple_of(GROUP) {
            from.k[range.start * d_k..][..keys].to_vec()
        } else {
            let mut k = vec![E::narrow(0.0); keys];
            for (token, source) in range.clone().enumerate() {
                for i in 0..d_k {
                    k[key_at(token, i, d_k)] = from.k[key_at(source, i, d_k)];
                }
            }
            k
        };
    }
}

#[cfg(test)]
mod tests;
