//! Parts and entries survive their codec; anything else is refused.

use std::sync::Arc;

use bytes::Bytes;
use half::{bf16, f16};
use hypic_state::codec::{ALIGN, CodecError, FORMAT_VERSION, decode, decode_entry, encode, encode_entry};
use hypic_state::{
    DType, Dense, Entry, EntryLayout, Host, HostKv, HostTensor, LayerKind, LayerPart, RecurrentPart, Transition,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const DTYPES: [DType; 4] = [DType::F32, DType::Bf16, DType::F16, DType::F64];

fn tensor(dtype: DType, shape: &[usize], seed: f32) -> HostTensor {
    let count = shape.iter().product::<usize>();
    let data: Vec<u8> = (0..count)
        .map(|i| seed + i as f32 * 0.25)
        .flat_map(|value| match dtype {
            DType::F32 => value.to_le_bytes().to_vec(),
            DType::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
            DType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
            DType::F64 => f64::from(value).to_le_bytes().to_vec(),
        })
        .collect();
    HostTensor::new(dtype, shape, data.into())
}

/// Parts of every kind over tensors of `dtype`.
fn parts(dtype: DType) -> Vec<LayerPart<Host>> {
    let (heads, d_k, d_v) = (3, 2, 5);
    let dense = |kept: &[u32]| {
        let blocks = tensor(dtype, &[kept.len(), d_k, d_k], -1.0);
        Transition::Dense(Dense { heads, kept: kept.to_vec(), blocks })
    };
    let transitions = [
        Transition::Scalar(tensor(dtype, &[heads], 1.0)),
        Transition::Diagonal(tensor(dtype, &[heads, d_k], 2.0)),
        dense(&[0, 2]),
        dense(&[]),
        dense(&[0, 1, 2]),
    ];
    let mut parts =
        vec![LayerPart::Attention(HostKv { k: tensor(dtype, &[4, 2, 3], 0.0), v: tensor(dtype, &[4, 2, 7], 9.0) })];
    for transition in transitions {
        for tail in [None, Some(tensor(dtype, &[3, 11], 5.0))] {
            let state = tensor(DType::F32, &[heads, d_k, d_v], 0.5);
            parts.push(LayerPart::Recurrent(RecurrentPart { transition: transition.clone(), state, tail }));
        }
    }
    parts.push(shared_values(dtype));
    parts
}

/// Keys whose first numbers are the values.
fn shared_values(dtype: DType) -> LayerPart<Host> {
    LayerPart::Attention(HostKv { k: tensor(dtype, &[4, 2, 3], 0.0), v: tensor(dtype, &[4, 2, 0], 0.0) })
}

fn assert_same(a: &LayerPart<Host>, b: &LayerPart<Host>) {
    match (a, b) {
        (LayerPart::Attention(a), LayerPart::Attention(b)) => assert_eq!(a, b),
        (LayerPart::Recurrent(a), LayerPart::Recurrent(b)) => {
            assert_eq!((&a.transition, &a.state, &a.tail), (&b.transition, &b.state, &b.tail));
        }
        _ => panic!("another kind of part came back"),
    }
}

/// The error of decoding `bytes`.
fn refusal(bytes: impl Into<Bytes>) -> CodecError {
    decode(bytes.into()).err().expect("must be refused")
}

/// Sets the checksum of an encoded part, so that what stands behind it is looked at.
fn seal(mut bytes: Vec<u8>) -> Bytes {
    let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes[..16]), &bytes[20..]);
    bytes[16..20].copy_from_slice(&crc.to_le_bytes());
    bytes.into()
}

/// The encoded dense part with kept heads 0 and 2 of 3.
fn sample() -> Vec<u8> {
    let part = parts(DType::F32).remove(6);
    assert!(matches!(&part, LayerPart::Recurrent(RecurrentPart { tail: Some(_), .. })));
    encode(&part).to_vec()
}

#[test]
fn every_kind_and_type_comes_back_equal() {
    for dtype in DTYPES {
        for part in parts(dtype) {
            let bytes = encode(&part);
            assert!(bytes.len().is_multiple_of(ALIGN));
            assert_same(&decode(bytes.clone()).unwrap(), &part);
            assert_eq!(encode(&decode(bytes.clone()).unwrap()), bytes);
        }
    }
}

#[test]
fn decoding_copies_no_tensor() {
    let bytes = encode(&parts(DType::Bf16)[0]);
    let LayerPart::Attention(kv) = decode(bytes.clone()).unwrap() else { panic!("attention") };
    for tensor in [&kv.k, &kv.v] {
        let offset = tensor.data().as_ptr() as usize - bytes.as_ptr() as usize;
        assert!(offset < bytes.len() && offset.is_multiple_of(ALIGN));
    }
}

#[test]
fn the_layout_is_the_documented_one() {
    let part = LayerPart::<Host>::Recurrent(RecurrentPart {
        transition: Transition::Dense(Dense {
            heads: 2,
            kept: vec![1],
            blocks: HostTensor::from_f32([1, 1, 1], &[1.0]),
        }),
        state: HostTensor::from_f32_as_bf16([2, 1, 1], &[2.0, -2.0]),
        tail: None,
    });
    let bytes = encode(&part);
    let mut expected = b"HYPL\x01\x00\x01\x03".to_vec();
    expected.extend(192u64.to_le_bytes());
    expected.extend(&bytes[16..20]); // checksum
    expected.extend([2, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]); // heads, kept heads, the one kept
    expected.extend([1, 3, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]); // f32 [1, 1, 1]
    expected.extend([2, 3, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]); // bf16 [2, 1, 1]
    assert_eq!(expected.len(), 64);
    expected.extend([0, 0, 0x80, 0x3f]);
    expected.resize(128, 0);
    expected.extend([0, 0x40, 0, 0xc0]);
    expected.resize(192, 0);
    assert_eq!(bytes, expected);
    assert_eq!(bytes, seal(expected));
}

#[test]
fn every_flipped_bit_is_refused() {
    let bytes = sample();
    for bit in 0..bytes.len() * 8 {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(decode(flipped.into()).is_err(), "bit {bit}");
    }
}

#[test]
fn every_truncation_and_extension_is_refused() {
    let bytes = sample();
    for end in 0..bytes.len() {
        assert!(matches!(refusal(bytes[..end].to_vec()), CodecError::Truncated { .. }), "{end} bytes");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert_eq!(refusal(longer), CodecError::Trailing { extra: 1 });
    // A length that covers the addition does not help.
    let mut longer = bytes;
    longer.resize(longer.len() + ALIGN, 0);
    let length = longer.len() as u64;
    longer[8..16].copy_from_slice(&length.to_le_bytes());
    assert_eq!(refusal(seal(longer)), CodecError::Trailing { extra: ALIGN });
}

/// The sample with `value` at `at` and a right checksum.
fn forged(at: usize, value: &[u8]) -> CodecError {
    let mut bytes = sample();
    bytes[at..at + value.len()].copy_from_slice(value);
    refusal(seal(bytes))
}

#[test]
fn unknown_and_contradictory_fields_are_refused_despite_a_right_checksum() {
    assert!(matches!(forged(0, b"PK"), CodecError::Magic { .. }));
    assert_eq!(forged(4, &[2, 0]), CodecError::Version { got: FORMAT_VERSION + 1 });
    assert_eq!(forged(6, &[9]), CodecError::Unknown { field: "part kind", value: 9 });
    assert_eq!(forged(7, &[7]), CodecError::Unknown { field: "transition kind", value: 7 });
    // No transition in a recurrent part, a dense one called scalar, a tail not announced.
    assert_eq!(forged(7, &[0]), CodecError::Unknown { field: "transition kind", value: 0 });
    assert!(matches!(forged(7, &[1]), CodecError::Malformed(_)));
    forged(6, &[1]);
    forged(6, &[3]);
    // Heads: one that leaves head 2 out of range, then kept heads that do not ascend.
    assert!(matches!(forged(20, &[2]), CodecError::Transition(_)));
    assert!(matches!(forged(28, &[2]), CodecError::Transition(_)));
    assert!(matches!(forged(28, &[3]), CodecError::Transition(_)));
    // Number of kept heads, absurdly large.
    assert!(matches!(forged(24, &[0xff; 4]), CodecError::Truncated { .. }));
    // First tensor header at 36: type, rank, reserved bytes, extents.
    assert_eq!(forged(36, &[0]), CodecError::Unknown { field: "data type", value: 0 });
    assert!(matches!(forged(37, &[255]), CodecError::Truncated { .. }));
    forged(37, &[2]);
    assert!(matches!(forged(38, &[1]), CodecError::Malformed(_)));
    assert!(matches!(forged(40, &[0xff; 4]), CodecError::Truncated { .. }));
    assert!(matches!(forged(40, &[0xff; 12]), CodecError::Malformed(_)));
    assert!(matches!(forged(44, &[0; 4]), CodecError::Malformed(_)));
    // Padding of the last tensor.
    let end = sample().len();
    assert_eq!(forged(end - 1, &[1]), CodecError::Malformed("padding that is not zero"));
    assert_eq!(forged(8, &u64::MAX.to_le_bytes()), CodecError::Truncated { need: u64::MAX, got: end });
    assert!(matches!(forged(8, &1u64.to_le_bytes()), CodecError::Malformed(_)));
}

#[test]
fn only_the_width_of_values_may_be_zero() {
    let bytes = encode(&shared_values(DType::F32)).to_vec();
    // Tensor headers at 28 (K) and 44 (V): extents four bytes on.
    let forged = |at: usize, value: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        decode(seal(bytes))
    };
    assert!(forged(56, 0).is_ok());
    let empty = CodecError::Malformed("a tensor with an empty inner axis");
    for at in [36, 40, 52] {
        assert_eq!(forged(at, 0).err(), Some(empty.clone()), "extent at {at}");
    }
    // Tokens or heads of the values that are not those of the keys.
    for (at, value) in [(48, 0), (48, 200), (52, 3)] {
        assert!(matches!(forged(at, value), Err(CodecError::Malformed(_))), "extent at {at}");
    }
    assert!(forged(56, 1).is_err());
    // In no other tensor: the tail of a part, the last one as well.
    let part = RecurrentPart::<Host> {
        transition: Transition::Scalar(tensor(DType::F32, &[1], 1.0)),
        state: tensor(DType::F32, &[1, 1, 1], 1.0),
        tail: Some(tensor(DType::F32, &[3, 0], 1.0)),
    };
    assert_eq!(refusal(encode(&LayerPart::Recurrent(part))), empty);
}

#[test]
fn random_bytes_behind_a_right_checksum_never_panic() {
    let mut rng = StdRng::seed_from_u64(3);
    let bytes = sample();
    for _ in 0..20_000 {
        let mut forged = bytes.clone();
        for _ in 0..rng.random_range(1..6) {
            let at = rng.random_range(6..100);
            forged[at] = rng.random();
        }
        // Most are refused; some (numbers of a tensor) are another valid part.
        let _ = decode(seal(forged));
    }
}

fn entry() -> (Entry<Host>, EntryLayout) {
    let mut all = parts(DType::F32).into_iter();
    let parts: Vec<_> = [all.nth(5), all.next(), None]
        .into_iter()
        .map(|part| part.unwrap_or_else(|| parts(DType::Bf16).remove(0)).into())
        .collect();
    let layout: EntryLayout = vec![LayerKind::Recurrent, LayerKind::Recurrent, LayerKind::Attention].into();
    let tokens: Arc<[u32]> = (0..7).map(|i| i * 1000).collect();
    (Entry::new(tokens, 3, &layout, parts).unwrap(), layout)
}

#[test]
fn entries_come_back_equal() {
    let (entry, layout) = entry();
    let bytes = encode_entry(&entry);
    let back = decode_entry(bytes.clone(), &layout).unwrap();
    assert_eq!((back.tokens(), back.seam(), back.bytes()), (entry.tokens(), 3, entry.bytes()));
    for (a, b) in back.parts().iter().zip(entry.parts()) {
        assert_same(a, b);
    }
    assert_eq!(encode_entry(&back), bytes);
}

#[test]
fn damaged_entries_are_refused() {
    let (entry, layout) = entry();
    let bytes = encode_entry(&entry).to_vec();
    for bit in 0..bytes.len() * 8 {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(decode_entry(flipped.into(), &layout).is_err(), "bit {bit}");
    }
    for end in 0..bytes.len() {
        assert!(decode_entry(bytes[..end].to_vec().into(), &layout).is_err(), "{end} bytes");
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert_eq!(decode_entry(longer.into(), &layout).err(), Some(CodecError::Trailing { extra: 1 }));
    let other: EntryLayout = vec![LayerKind::Recurrent, LayerKind::Attention, LayerKind::Attention].into();
    assert!(matches!(decode_entry(bytes.clone().into(), &other), Err(CodecError::Entry(_))));
    assert!(matches!(decode_entry(bytes.into(), &layout[..2].into()), Err(CodecError::Entry(_))));
}

#[test]
fn parts_that_changed_places_are_refused() {
    let (entry, layout) = entry();
    let bytes = encode_entry(&entry);
    let lengths: Vec<usize> = entry.parts().iter().map(|part| encode(part).len()).collect();
    let header = bytes.len() - lengths.iter().sum::<usize>();
    let mut swapped = bytes[..header].to_vec();
    swapped.extend_from_slice(&bytes[header + lengths[0]..][..lengths[1]]);
    swapped.extend_from_slice(&bytes[header..][..lengths[0]]);
    swapped.extend_from_slice(&bytes[header + lengths[0] + lengths[1]..]);
    let error = decode_entry(swapped.into(), &layout).expect_err("must be refused");
    assert!(matches!(error, CodecError::Layer { layer: 0, .. }), "{error}");
}
