//! Layer parts between a backend's memory and the host's, where they have the form in which they travel.

use hypic_state::{Host, HostKv, LayerPart, RecurrentPart};

use crate::{Backend, KvShape};

/// A copy of `part` in host memory.
pub fn part_to_host<B: Backend>(backend: &B, part: &LayerPart<B>) -> LayerPart<Host> {
    match part {
        LayerPart::Recurrent(p) => LayerPart::Recurrent(RecurrentPart {
            transition: p.transition.map(|t| backend.download(t)),
            state: backend.download(&p.state),
            tail: p.tail.as_ref().map(|t| backend.download(t)),
        }),
        LayerPart::Attention(kv) => LayerPart::Attention(backend.kv_download(kv)),
    }
}

/// A copy of `part` in the backend's memory. Shapes are those that the codec lets through: K `[tokens, kv heads, d_k]`,
/// V `[tokens, kv heads, d_v]`, d_v being 0 where values are shared.
pub fn part_from_host<B: Backend>(backend: &B, part: &LayerPart<Host>) -> LayerPart<B> {
    match part {
        LayerPart::Recurrent(p) => LayerPart::Recurrent(RecurrentPart {
            transition: p.transition.map(|t| backend.upload(t)),
            state: backend.upload(&p.state),
            tail: p.tail.as_ref().map(|t| backend.upload(t)),
        }),
        LayerPart::Attention(kv) => LayerPart::Attention(backend.kv_upload(kv, kv_shape(kv))),
    }
}

fn kv_shape(kv: &HostKv) -> KvShape {
    let (k, v) = (kv.k.shape(), kv.v.shape());
    KvShape { heads: k[1], d_k: k[2], d_v: v[2], shared: v[2] == 0, dtype: kv.k.dtype() }
}
