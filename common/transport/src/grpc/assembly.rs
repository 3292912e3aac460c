//! The parts of one entry as they arrive over the wire.
//!
//! A chunk is a stretch of one encoded part, a part covers a range of the body's tokens in one layer. K and V of a layer may
//! come in any number of ranges and any order of them, each token once; together they make the layer's part. What can go
//! wrong is a sender that lies or breaks off: every byte is checked (key, layer, kind, range, order, checksum), and what
//! does not fit is refused by entry, layer and range. Held are at most the entry's own bytes and one part being received.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::{Bytes, BytesMut};
use hypic_cache::EntryKey;
use hypic_proto::v1;
use hypic_state::codec::decode;
use hypic_state::{EntryLayout, Host, HostKv, HostTensor, LayerKind, LayerPart};
use tonic::Status;

use super::convert;

/// One entry's layers, as far as they have come.
pub(super) struct Assembly {
    key: EntryKey,
    layout: EntryLayout,
    /// The body, in tokens of the segment.
    body: Range<usize>,
    /// Encoded bytes of a layer at most.
    limit: u64,
    layers: Vec<Layer>,
    current: Option<Current>,
}

enum Layer {
    Open(Ranges),
    Complete,
}

/// What has come of a layer.
#[derive(Default)]
struct Ranges {
    /// By first token; disjoint.
    kv: BTreeMap<usize, KvPiece>,
    tokens: usize,
    encoded_bytes: u64,
}

struct KvPiece {
    end: usize,
    kv: HostKv,
}

/// The part whose chunks are coming.
struct Current {
    layer: usize,
    tokens: Range<usize>,
    encoded_bytes: u64,
    received: BytesMut,
}

impl Assembly {
    /// Nothing of the entry `key` yet, whose body is the tokens `body` of its segment.
    pub fn new(key: EntryKey, layout: EntryLayout, body: Range<usize>, limit: u64) -> Self {
        let layers = layout.iter().map(|_| Layer::Open(Ranges::default())).collect();
        Assembly { key, layout, body, limit, layers, current: None }
    }

    /// Take in a chunk; the layer that it completes, if it does.
    ///
    /// # Errors
    /// If it does not fit: the transfer is then of no more use.
    pub fn take(&mut self, chunk: v1::PartChunk) -> Result<Option<(usize, LayerPart<Host>)>, Status> {
        if chunk.key[..] != self.key.as_bytes()[..] {
            return Err(convert::invalid(format!("entry {}: a chunk of another entry", self.key)));
        }
        let (layer, tokens) = (chunk.layer as usize, chunk.token_begin as usize..chunk.token_end as usize);
        let mut current = match self.current.take() {
            Some(current) => current,
            None => self.begin(layer, tokens.clone(), &chunk)?,
        };
        self.check(&current, layer, tokens, &chunk)?;
        let whole = current.encoded_bytes as usize;
        let encoded = if chunk.data.len() == whole {
            chunk.data
        } else {
            current.received.extend_from_slice(&chunk.data);
            if current.received.len() < whole {
                self.current = Some(current);
                return Ok(None);
            }
            current.received.freeze()
        };
        let complete = self.part(layer, current.tokens, encoded)?;
        Ok(complete.map(|part| (layer, part)))
    }

    /// The transfer says that everything was sent.
    ///
    /// # Errors
    /// If something is missing.
    pub fn finish(&self) -> Result<(), Status> {
        let Some(layer) = self.layers.iter().position(|l| matches!(l, Layer::Open(_))) else {
            return Ok(());
        };
        let whole = self.layers.iter().filter(|l| matches!(l, Layer::Complete)).count();
        let ended = format!("the transfer ended with {whole} of {} layers whole", self.layers.len());
        Err(self.refused(layer, &self.first_gap(layer), format!("missing; {ended}")))
    }

    /// The transfer stopped without saying that it ends.
    pub fn broken_off(&self) -> Status {
        Status::data_loss(format!("entry {}: the transfer broke off", self.key))
    }

    fn begin(&self, layer: usize, tokens: Range<usize>, chunk: &v1::PartChunk) -> Result<Current, Status> {
        let refused = |why: String| Err(self.refused(layer, &tokens, why));
        let Some(&expected) = self.layout.get(layer) else {
            return refused(format!("the model has {} layers", self.layout.len()));
        };
        if chunk.kind != wire_kind(expected) as i32 {
            return refused(format!("kind {} in a layer of kind {expected:?}", chunk.kind));
        }
        let Range { start, end } = self.body;
        if tokens.is_empty() || tokens.start < start || tokens.end > end {
            return refused(format!("not a range of the body, which is {start}..{end}"));
        }
        if expected == LayerKind::Recurrent && tokens != self.body {
            return refused(format!("a recurrent part covers the body, which is {start}..{end}"));
        }
        let ranges = match &self.layers[layer] {
            Layer::Open(ranges) => ranges,
            Layer::Complete => return refused("all of the layer came before".to_string()),
        };
        // Disjoint, so the last that begins before the range's end reaches farthest.
        let nearest = ranges.kv.range(..tokens.end).next_back();
        if let Some((from, before)) = nearest.filter(|(_, before)| before.end > tokens.start) {
            return refused(format!("overlaps {from}..{}, which came before", before.end));
        }
        let bytes = ranges.encoded_bytes.saturating_add(chunk.part_bytes);
        if bytes > self.limit {
            return refused(format!("{bytes} bytes in the layer, at most {} are taken", self.limit));
        }
        Ok(Current { layer, tokens, encoded_bytes: chunk.part_bytes, received: BytesMut::new() })
    }

    /// Whether the chunk continues the current part, and is intact.
    fn check(
        &self,
        current: &Current,
        layer: usize,
        tokens: Range<usize>,
        chunk: &v1::PartChunk,
    ) -> Result<(), Status> {
        let refused = |why: String| Err(self.refused(layer, &tokens, why));
        if (layer, &tokens, chunk.part_bytes) != (current.layer, &current.tokens, current.encoded_bytes) {
            let Current { layer, tokens: Range { start, end }, .. } = current;
            return refused(format!("in the middle of layer {layer}, tokens {start}..{end}"));
        }
        let (bytes, at, of) = (chunk.data.len() as u64, chunk.offset, chunk.part_bytes);
        if bytes == 0 || at != current.received.len() as u64 || at.saturating_add(bytes) > of {
            return refused(format!("{bytes} bytes at {at} of {of} are out of order"));
        }
        let computed = crc32c::crc32c(&chunk.data);
        if computed != chunk.crc32c {
            return refused(format!("checksum is {computed:08x}, not {:08x}", chunk.crc32c));
        }
        Ok(())
    }

    /// A part is there; the layer's, if that makes it whole.
    fn part(&mut self, layer: usize, tokens: Range<usize>, encoded: Bytes) -> Result<Option<LayerPart<Host>>, Status> {
        let encoded_bytes = encoded.len() as u64;
        let part = decode(encoded).map_err(|e| self.refused(layer, &tokens, e.to_string()))?;
        let expected = self.layout[layer];
        if part.kind() != expected {
            return Err(self.refused(layer, &tokens, format!("{:?}, not {expected:?}", part.kind())));
        }
        let LayerPart::Attention(kv) = part else {
            self.layers[layer] = Layer::Complete;
            return Ok(Some(part));
        };
        let got = kv.k.shape()[0];
        if got != tokens.len() {
            return Err(self.refused(layer, &tokens, format!("K and V of {got} tokens")));
        }
        let Layer::Open(ranges) = &mut self.layers[layer] else { unreachable!("looked at when the part began") };
        if let Some(other) = ranges.kv.values().next()
            && row_form(&other.kv) != row_form(&kv)
        {
            let why = format!("rows of the form {:?}, those before have {:?}", row_form(&kv), row_form(&other.kv));
            return Err(self.refused(layer, &tokens, why));
        }
        ranges.tokens += tokens.len();
        ranges.encoded_bytes += encoded_bytes;
        ranges.kv.insert(tokens.start, KvPiece { end: tokens.end, kv });
        if ranges.tokens < self.body.len() {
            return Ok(None);
        }
        let pieces = std::mem::take(&mut ranges.kv);
        self.layers[layer] = Layer::Complete;
        Ok(Some(LayerPart::Attention(joined(pieces))))
    }

    /// First tokens of `layer` that have not come.
    fn first_gap(&self, layer: usize) -> Range<usize> {
        let mut from = self.body.start;
        if let Layer::Open(ranges) = &self.layers[layer] {
            for (&start, piece) in &ranges.kv {
                if start > from {
                    return from..start;
                }
                from = piece.end;
            }
        }
        from..self.body.end
    }

    fn refused(&self, layer: usize, tokens: &Range<usize>, why: String) -> Status {
        let Range { start, end } = tokens;
        Status::data_loss(format!("entry {}, layer {layer}, tokens {start}..{end}: {why}", self.key))
    }
}

/// The kind of a layer's parts, as messages name it.
pub(super) fn wire_kind(kind: LayerKind) -> v1::PartKind {
    match kind {
        LayerKind::Recurrent => v1::PartKind::Recurrent,
        LayerKind::Attention => v1::PartKind::Attention,
    }
}

/// What all K and V of a layer have in common: the extents behind the tokens, and the types.
fn row_form(kv: &HostKv) -> (&[usize], &[usize], hypic_state::DType, hypic_state::DType) {
    (&kv.k.shape()[1..], &kv.v.shape()[1..], kv.k.dtype(), kv.v.dtype())
}

/// All tokens of a layer, in order. A single piece is passed on as it is.
fn joined(pieces: BTreeMap<usize, KvPiece>) -> HostKv {
    let tokens: usize = pieces.values().map(|piece| piece.kv.k.shape()[0]).sum();
    let mut pieces = pieces.into_values().map(|piece| piece.kv);
    let first = pieces.next().expect("a body has tokens");
    if pieces.len() == 0 {
        return first;
    }
    let start = |tensor: &HostTensor| {
        let mut data = Vec::with_capacity(tensor.data().len() / tensor.shape()[0] * tokens);
        data.extend_from_slice(tensor.data());
        (tensor.dtype(), [tokens, tensor.shape()[1], tensor.shape()[2]], data)
    };
    let (mut k, mut v) = (start(&first.k), start(&first.v));
    drop(first);
    for kv in pieces {
        k.2.extend_from_slice(kv.k.data());
        v.2.extend_from_slice(kv.v.data());
    }
    let end = |(dtype, shape, data): (_, [usize; 3], Vec<u8>)| HostTensor::new(dtype, shape, data.into());
    HostKv { k: end(k), v: end(v) }
}

#[cfg(test)]
mod tests;
