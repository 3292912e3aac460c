//! The form in which entries and their layer parts travel and are stored: one format for the wire
//! and for disks.
//!
//! A part is self-contained: what it holds, the type and shape of each tensor, and a CRC-32C over all
//! of it. Decoding copies no tensor (they are slices of the given bytes), allocates nothing that the
//! given bytes do not cover, and refuses whatever it does not know in full: another version, another
//! kind, one byte too many, padding that is not zero. What can go wrong is thus a [`CodecError`],
//! never a panic and never a wrong tensor.
//!
//! All numbers are little-endian. A part is a multiple of [`ALIGN`] bytes long, so that the tensors of
//! parts laid end to end stay aligned:
//!
//! | bytes | what |
//! |---|---|
//! | 4 | magic `HYPL` |
//! | 2 | format version |
//! | 1 | kind: 1 recurrent without tail, 2 recurrent with tail, 3 attention |
//! | 1 | transition: 0 none (attention), 1 scalar, 2 diagonal, 3 dense |
//! | 8 | length of the part, from the magic to its last byte |
//! | 4 | CRC-32C of all other bytes of the part |
//! | 4 | heads of a dense transition, else 0 |
//! | 4 | kept heads of a dense transition, else 0 |
//! | 4 n | the kept heads, ascending |
//! | per tensor | data type (1), rank (1), two zero bytes, extents (4 each) |
//! | | each tensor's data behind zeros up to the next multiple of [`ALIGN`]; zeros up to the end |
//!
//! Tensors are, in this order: transition, state, tail; or K, V. V's last extent is 0 where values are the first numbers
//! of the keys (latent attention) and are not stored. An entry is a header of its own
//! (magic `HYPE`, version, two zero bytes, length of header, CRC-32C of the header's other bytes,
//! seam, number of tokens, number of layers, token ids, the parts' checksums, zeros up to the next
//! multiple of [`ALIGN`]) and the parts in layer order. The checksums in the header tie the parts to
//! their entry and their place in it.

mod reader;

use bytes::Bytes;

use self::reader::{Reader, check, checksum, dtype_code, length_behind};
use crate::{
    Dense, Entry, EntryError, EntryLayout, Host, HostKv, HostTensor, LayerPart, RecurrentPart, Transition,
    TransitionError,
};

/// Version of the format. Part of every entry's key: a new version finds none of the old entries.
pub const FORMAT_VERSION: u16 = 1;

/// Tensor data starts at multiples of this many bytes, counted from the start of its part.
pub const ALIGN: usize = 64;

const PART_MAGIC: [u8; 4] = *b"HYPL";
const ENTRY_MAGIC: [u8; 4] = *b"HYPE";

const RECURRENT: u8 = 1;
const RECURRENT_WITH_TAIL: u8 = 2;
const ATTENTION: u8 = 3;

const NO_TRANSITION: u8 = 0;
const SCALAR: u8 = 1;
const DIAGONAL: u8 = 2;
const DENSE: u8 = 3;

/// Where a part's checksum stands.
const PART_CRC: usize = 16;
/// Where an entry's header has its checksum.
const ENTRY_CRC: usize = 16;

/// Why bytes are no part or no entry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The bytes start with something else.
    #[error("this is no {what}: it starts with {got:02x?}")]
    Magic {
        /// What was to be decoded.
        what: &'static str,
        /// The first bytes.
        got: [u8; 4],
    },
    /// Written by another version.
    #[error("format version {got} is unknown, this program reads version {FORMAT_VERSION}")]
    Version {
        /// Version found.
        got: u16,
    },
    /// Fewer bytes than announced.
    #[error("truncated: {need} bytes are needed, {got} are there")]
    Truncated {
        /// Bytes needed.
        need: u64,
        /// Bytes given.
        got: usize,
    },
    /// More bytes than announced.
    #[error("{extra} bytes behind the end")]
    Trailing {
        /// Bytes too many.
        extra: usize,
    },
    /// The bytes were changed since they were written.
    #[error("corrupt: checksum {stored:08x} stored, {computed:08x} computed")]
    Checksum {
        /// The one written.
        stored: u32,
        /// That of the bytes.
        computed: u32,
    },
    /// A field has a value without a meaning.
    #[error("unknown {field} {value}")]
    Unknown {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// Fields that contradict each other.
    #[error("malformed: {0}")]
    Malformed(&'static str),
    /// The transition is none of the layer's.
    #[error(transparent)]
    Transition(#[from] TransitionError),
    /// The parts are no entry of the model.
    #[error(transparent)]
    Entry(#[from] EntryError),
    /// A part of an entry cannot be decoded.
    #[error("layer {layer}: {error}")]
    Layer {
        /// Index of the layer.
        layer: usize,
        /// What is wrong with its part.
        error: Box<CodecError>,
    },
}

/// The encoded form of `part`.
///
/// # Panics
/// If a tensor's extent or the number of heads does not fit in 32 bits.
pub fn encode(part: &LayerPart<Host>) -> Bytes {
    let (kind, transition, tensors) = match part {
        LayerPart::Recurrent(p) => {
            let kind = if p.tail.is_some() { RECURRENT_WITH_TAIL } else { RECURRENT };
            let mut tensors = vec![p.transition.tensor(), &p.state];
            tensors.extend(&p.tail);
            (kind, Some(&p.transition), tensors)
        }
        LayerPart::Attention(kv) => (ATTENTION, None, vec![&kv.k, &kv.v]),
    };
    let (code, dense) = match transition {
        None => (NO_TRANSITION, None),
        Some(Transition::Scalar(_)) => (SCALAR, None),
        Some(Transition::Diagonal(_)) => (DIAGONAL, None),
        Some(Transition::Dense(dense)) => (DENSE, Some(dense)),
    };
    let kept = dense.map_or(&[][..], |d| &d.kept);

    let payload: usize = tensors.iter().map(|t| t.data().len() + ALIGN).sum();
    let mut out = Vec::with_capacity(payload + 4 * ALIGN + kept.len() * 4);
    out.extend(PART_MAGIC);
    out.extend(FORMAT_VERSION.to_le_bytes());
    out.extend([kind, code]);
    out.extend([0; 12]); // length and checksum, known at the end
    out.extend(word(dense.map_or(0, |d| d.heads)));
    out.extend(word(kept.len()));
    kept.iter().for_each(|head| out.extend(head.to_le_bytes()));
    for tensor in &tensors {
        out.extend([dtype_code(tensor.dtype()), tensor.shape().len() as u8, 0, 0]);
        tensor.shape().iter().for_each(|extent| out.extend(word(*extent)));
    }
    for tensor in &tensors {
        pad(&mut out);
        out.extend_from_slice(tensor.data());
    }
    pad(&mut out);
    let length = out.len() as u64;
    out[8..16].copy_from_slice(&length.to_le_bytes());
    let crc = checksum(&out, PART_CRC);
    out[PART_CRC..][..4].copy_from_slice(&crc.to_le_bytes());
    out.into()
}

/// The part in `bytes`, which must hold nothing else. Its tensors are slices of `bytes`.
///
/// # Errors
/// If `bytes` is not exactly one intact part of a known version and kind.
pub fn decode(bytes: Bytes) -> Result<LayerPart<Host>, CodecError> {
    let length = part_length(&bytes)?;
    if bytes.len() > length {
        return Err(CodecError::Trailing { extra: bytes.len() - length });
    }
    check(&bytes, PART_CRC)?;

    let mut reader = Reader { bytes: &bytes, at: 6 };
    let [kind, code] = reader.array()?;
    reader.at = PART_CRC + 4;
    let (heads, kept) = (reader.extent()?, reader.extent()?);
    let kept = reader.words(kept)?;
    let for_dense_only = heads != 0 || !kept.is_empty();

    let part = match (kind, code) {
        (ATTENTION, NO_TRANSITION) => {
            let [k, v] = reader.tensors(Some(1))?;
            LayerPart::Attention(HostKv { k, v })
        }
        (RECURRENT, SCALAR | DIAGONAL | DENSE) => {
            let [transition, state] = reader.tensors(None)?;
            recurrent(code, heads, kept, transition, state, None)
        }
        (RECURRENT_WITH_TAIL, SCALAR | DIAGONAL | DENSE) => {
            let [transition, state, tail] = reader.tensors(None)?;
            recurrent(code, heads, kept, transition, state, Some(tail))
        }
        (RECURRENT | RECURRENT_WITH_TAIL | ATTENTION, _) => {
            return Err(CodecError::Unknown { field: "transition kind", value: code.into() });
        }
        _ => {
            return Err(CodecError::Unknown { field: "part kind", value: kind.into() });
        }
    };
    if code != DENSE && for_dense_only {
        return Err(CodecError::Malformed("kept heads of a transition that is not dense"));
    }
    reader.finish()?;
    validate(&part)?;
    Ok(part)
}

/// The encoded form of `entry`.
///
/// # Panics
/// As [`encode`], and if the entry has more than 2^32 tokens or layers.
pub fn encode_entry(entry: &Entry<Host>) -> Bytes {
    let parts: Vec<Bytes> = entry.parts().iter().map(|part| encode(part)).collect();
    let tokens = entry.tokens();
    let header = 32 + 4 * (tokens.len() + parts.len());
    let mut out = Vec::with_capacity(header.next_multiple_of(ALIGN) + parts.iter().map(Bytes::len).sum::<usize>());
    out.extend(ENTRY_MAGIC);
    out.extend(FORMAT_VERSION.to_le_bytes());
    out.extend([0; 2]);
    out.extend((header.next_multiple_of(ALIGN) as u64).to_le_bytes());
    out.extend([0; 4]); // checksum, known at the end
    out.extend(word(entry.seam()));
    out.extend(word(tokens.len()));
    out.extend(word(parts.len()));
    tokens.iter().for_each(|token| out.extend(token.to_le_bytes()));
    parts.iter().for_each(|part| out.extend_from_slice(&part[PART_CRC..][..4]));
    debug_assert_eq!(out.len(), header);
    pad(&mut out);
    let crc = checksum(&out, ENTRY_CRC);
    out[ENTRY_CRC..][..4].copy_from_slice(&crc.to_le_bytes());
    parts.iter().for_each(|part| out.extend_from_slice(part));
    out.into()
}

/// The entry in `bytes`, which must hold nothing else, of a model whose entries have the layout
/// `layout`. Its tensors are slices of `bytes`.
///
/// # Errors
/// If `bytes` is not exactly one intact entry of a known version, or not one of such a model.
pub fn decode_entry(bytes: Bytes, layout: &EntryLayout) -> Result<Entry<Host>, CodecError> {
    let header = length_behind(&bytes, "entry", ENTRY_MAGIC)?;
    check(&bytes[..header], ENTRY_CRC)?;

    let mut reader = Reader { bytes: &bytes.slice(..header), at: 6 };
    if reader.array::<2>()? != [0; 2] {
        return Err(CodecError::Malformed("reserved bytes that are not zero"));
    }
    reader.at = ENTRY_CRC + 4;
    let (seam, tokens, layers) = (reader.extent()?, reader.extent()?, reader.extent()?);
    let tokens = reader.words(tokens)?;
    let checksums = reader.words(layers)?;
    reader.finish()?;
    if layers != layout.len() {
        return Err(EntryError::Layers { expected: layout.len(), got: layers }.into());
    }

    let mut rest = bytes.slice(header..);
    let mut parts = Vec::with_capacity(checksums.len());
    for (layer, stored) in checksums.into_iter().enumerate() {
        let in_layer = |error| CodecError::Layer { layer, error: Box::new(error) };
        let length = part_length(&rest).map_err(in_layer)?;
        let part = rest.split_to(length);
        let computed = u32::from_le_bytes(part[PART_CRC..][..4].try_into().expect("four bytes"));
        if stored != computed {
            return Err(in_layer(CodecError::Checksum { stored, computed }));
        }
        parts.push(decode(part).map_err(in_layer)?.into());
    }
    if !rest.is_empty() {
        return Err(CodecError::Trailing { extra: rest.len() });
    }
    let entry = Entry::new(tokens.into(), seam, layout, parts)?;
    for (layer, part) in entry.parts().iter().enumerate() {
        if let LayerPart::Attention(kv) = &**part
            && kv.k.shape()[0] != entry.body_len()
        {
            let error = Box::new(CodecError::Malformed("K and V of another number of tokens than the body has"));
            return Err(CodecError::Layer { layer, error });
        }
    }
    Ok(entry)
}

/// Length of the part that `bytes` start with.
fn part_length(bytes: &[u8]) -> Result<usize, CodecError> {
    length_behind(bytes, "layer part", PART_MAGIC)
}

fn recurrent(
    code: u8,
    heads: usize,
    kept: Vec<u32>,
    tensor: HostTensor,
    state: HostTensor,
    tail: Option<HostTensor>,
) -> LayerPart<Host> {
    let transition = match code {
        SCALAR => Transition::Scalar(tensor),
        DIAGONAL => Transition::Diagonal(tensor),
        _ => Transition::Dense(Dense { heads, kept, blocks: tensor }),
    };
    LayerPart::Recurrent(RecurrentPart { transition, state, tail })
}

/// Checks that the tensors of a part belong together.
fn validate(part: &LayerPart<Host>) -> Result<(), CodecError> {
    match part {
        LayerPart::Recurrent(p) => {
            let (heads, d_k) = p.transition.dims()?;
            let &[state_heads, state_d_k, _] = p.state.shape() else {
                return Err(TransitionError::State { got: p.state.shape().to_vec() }.into());
            };
            if heads != state_heads {
                return Err(TransitionError::Heads { expected: heads, got: state_heads }.into());
            }
            if let Some(expected) = d_k.filter(|d_k| *d_k != state_d_k) {
                return Err(TransitionError::KeyWidth { expected, got: state_d_k }.into());
            }
            if p.tail.as_ref().is_some_and(|tail| tail.shape().len() != 2) {
                return Err(CodecError::Malformed("a convolution tail that is not [kernel - 1, channels]"));
            }
        }
        LayerPart::Attention(kv) => {
            let (k, v) = (kv.k.shape(), kv.v.shape());
            if k.len() != 3 || v.len() != 3 || k[..2] != v[..2] {
                return Err(CodecError::Malformed("K and V are not [tokens, kv heads, d_k] and [.., d_v]"));
            }
        }
    }
    Ok(())
}

fn word(value: usize) -> [u8; 4] {
    u32::try_from(value).expect("extents fit in 32 bits").to_le_bytes()
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(ALIGN), 0);
}
