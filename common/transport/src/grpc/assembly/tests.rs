//! Layers in ranges of all sizes and orders, and what is not a range of the entry.

use hypic_cache::{Fingerprint, KeySpace};
use hypic_state::codec::encode;
use hypic_state::{DType, RecurrentPart, Transition};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use tonic::Code;

use super::*;

const SEAM: usize = 3;
const TOKENS: usize = 40;
const BODY: Range<usize> = SEAM..TOKENS;
const LIMIT: u64 = 1 << 20;
const LAYOUT: [LayerKind; 3] = [LayerKind::Recurrent, LayerKind::Attention, LayerKind::Attention];

fn key() -> EntryKey {
    let tokens: Vec<u32> = (0..TOKENS as u32).collect();
    EntryKey::new(&KeySpace::new(Fingerprint([0; 32]), DType::F32), SEAM, &[], b"", &tokens)
}

fn empty() -> Assembly {
    Assembly::new(key(), LAYOUT.into(), BODY, LIMIT)
}

/// K `[tokens, 2, 3]` and V `[tokens, 2, 5]` of one layer: other numbers for each layer and token.
fn kv(layer: usize, tokens: Range<usize>) -> LayerPart<Host> {
    let tensor = |width: usize, mark: f32| {
        let values: Vec<f32> = tokens
            .clone()
            .flat_map(|t| (0..2 * width).map(move |i| mark + (layer * 10_000 + t * 100 + i) as f32))
            .collect();
        HostTensor::from_f32([tokens.len(), 2, width], &values)
    };
    LayerPart::Attention(HostKv { k: tensor(3, 0.0), v: tensor(5, 0.5) })
}

fn recurrent() -> LayerPart<Host> {
    let transition = Transition::Scalar(HostTensor::from_f32([2], &[0.5, 0.25]));
    let state = HostTensor::from_f32([2, 1, 2], &[1.0, 2.0, 3.0, 4.0]);
    LayerPart::Recurrent(RecurrentPart { transition, state, tail: None })
}

fn whole(layer: usize) -> LayerPart<Host> {
    if layer == 0 { recurrent() } else { kv(layer, BODY) }
}

/// The chunks of one part, `size` bytes each.
fn chunks(layer: usize, tokens: Range<usize>, part: &LayerPart<Host>, size: usize) -> Vec<v1::PartChunk> {
    let encoded = encode(part);
    let chunk = |at: usize| {
        let data = encoded.slice(at..encoded.len().min(at + size));
        v1::PartChunk {
            transfer: None,
            key: Bytes::copy_from_slice(key().as_bytes()),
            layer: layer as u32,
            kind: wire_kind(part.kind()) as i32,
            token_begin: tokens.start as u32,
            token_end: tokens.end as u32,
            offset: at as u64,
            part_bytes: encoded.len() as u64,
            crc32c: crc32c::crc32c(&data),
            data,
        }
    };
    (0..encoded.len()).step_by(size).map(chunk).collect()
}

fn range(layer: usize, tokens: Range<usize>) -> v1::PartChunk {
    chunks(layer, tokens.clone(), &kv(layer, tokens), usize::MAX).remove(0)
}

/// The body cut at random.
fn cuts(rng: &mut StdRng) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let mut from = BODY.start;
    let longest = rng.random_range(1..=BODY.len());
    while from < BODY.end {
        let to = BODY.end.min(from + rng.random_range(1..=longest));
        ranges.push(from..to);
        from = to;
    }
    ranges
}

#[test]
fn any_ranges_in_any_order_make_the_same_layers() {
    for seed in 0..300 {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut parts = vec![(0, BODY, recurrent())];
        for layer in 1..LAYOUT.len() {
            parts.extend(cuts(&mut rng).into_iter().map(|tokens| (layer, tokens.clone(), kv(layer, tokens))));
        }
        parts.shuffle(&mut rng);
        let mut left = LAYOUT.map(|_| 0);
        parts.iter().for_each(|(layer, ..)| left[*layer] += 1);
        let mut assembly = empty();
        for (layer, tokens, part) in parts {
            assert!(assembly.finish().is_err(), "seed {seed}: it is not whole");
            left[layer] -= 1;
            let size = rng.random_range(1..700);
            let chunks = chunks(layer, tokens, &part, size);
            let last = chunks.len() - 1;
            for (i, chunk) in chunks.into_iter().enumerate() {
                let complete = assembly.take(chunk).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
                assert_eq!(
                    complete.is_some(),
                    i == last && left[layer] == 0,
                    "seed {seed}: handed out when it is whole"
                );
                if let Some((got, part)) = complete {
                    assert_eq!(got, layer);
                    assert!(encode(&part) == encode(&whole(layer)), "seed {seed}: layer {layer}");
                }
            }
        }
        assert_eq!(left, [0; 3]);
        assembly.finish().unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    }
}

/// The memory of a layer that comes in one range is not copied.
#[test]
fn a_layer_in_one_range_is_passed_on_as_it_came() {
    let chunk = range(1, BODY);
    let from = chunk.data.as_ptr_range();
    let Some((1, LayerPart::Attention(kv))) = empty().take(chunk).expect("good") else {
        panic!("the layer is whole");
    };
    assert!(from.contains(&kv.k.data().as_ptr()) && from.contains(&kv.v.data().as_ptr()));
}

/// What `chunk` is refused with after `before`.
fn refusal(before: &[v1::PartChunk], chunk: v1::PartChunk) -> Status {
    let mut assembly = empty();
    for good in before {
        assembly.take(good.clone()).expect("good so far");
    }
    assembly.take(chunk).map(|_| ()).expect_err("refused")
}

#[test]
fn what_does_not_fit_is_refused_by_entry_layer_and_range() {
    let edit = |mut chunk: v1::PartChunk, change: fn(&mut v1::PartChunk)| {
        change(&mut chunk);
        chunk
    };
    let first = range(1, 3..10);
    let some = [first.clone(), range(1, 20..30)];
    let whole = [range(1, BODY)];
    let begun = &chunks(1, 10..20, &kv(1, 10..20), 100)[..1];
    let state = chunks(0, BODY, &recurrent(), usize::MAX).remove(0);
    let narrow = {
        let tensor = || HostTensor::from_f32([10, 2, 2], &[0.0; 40]);
        chunks(1, 10..20, &LayerPart::Attention(HostKv { k: tensor(), v: tensor() }), usize::MAX).remove(0)
    };
    let cases: Vec<(&[v1::PartChunk], v1::PartChunk, &str)> = vec![
        (&some, first.clone(), "layer 1, tokens 3..10: overlaps 3..10, which came before"),
        (&some, range(1, 9..11), "layer 1, tokens 9..11: overlaps 3..10"),
        (&some, range(1, 15..40), "layer 1, tokens 15..40: overlaps 20..30"),
        (&some, range(1, 25..26), "layer 1, tokens 25..26: overlaps 20..30"),
        (&some, range(1, 3..40), "layer 1, tokens 3..40: overlaps 20..30"),
        (&[], range(2, 30..41), "layer 2, tokens 30..41: not a range of the body, which is 3..40"),
        (&[], range(2, 2..10), "layer 2, tokens 2..10: not a range of the body"),
        (&[], edit(first.clone(), |c| c.token_end = 3), "layer 1, tokens 3..3: not a range of the body"),
        (&[], edit(first.clone(), |c| c.token_begin = 12), "layer 1, tokens 12..10: not a range of the body"),
        (&[], edit(first.clone(), |c| c.token_end = 11), "layer 1, tokens 3..11: K and V of 7 tokens"),
        (&[], edit(first.clone(), |c| c.layer = 3), "layer 3, tokens 3..10: the model has 3 layers"),
        (&[], edit(first.clone(), |c| c.layer = 0), "layer 0, tokens 3..10: kind 2 in a layer of kind Recurrent"),
        (&[], edit(first.clone(), |c| c.kind = 1), "layer 1, tokens 3..10: kind 1 in a layer of kind Attention"),
        (&[], edit(state.clone(), |c| (c.layer, c.kind) = (1, 2)), "layer 1, tokens 3..40: Recurrent, not Attention"),
        (&[], edit(state.clone(), |c| c.token_end = 39), "layer 0, tokens 3..39: a recurrent part covers the body"),
        (std::slice::from_ref(&state), state.clone(), "layer 0, tokens 3..40: all of the layer came before"),
        (&whole, first.clone(), "layer 1, tokens 3..10: all of the layer came before"),
        (begun, first.clone(), "layer 1, tokens 3..10: in the middle of layer 1, tokens 10..20"),
        (begun, begun[0].clone(), "layer 1, tokens 10..20: 100 bytes at 0 of"),
        (&[], edit(first.clone(), |c| c.offset = 64), "layer 1, tokens 3..10: 576 bytes at 64 of 576 are out of order"),
        (&[], edit(first.clone(), |c| c.part_bytes = 10), "layer 1, tokens 3..10: 576 bytes at 0 of 10"),
        (&[], edit(first.clone(), |c| c.part_bytes = u64::MAX), "at most 1048576 are taken"),
        (&[], edit(first.clone(), |c| c.data.clear()), "layer 1, tokens 3..10: 0 bytes at 0 of 576"),
        (&[], edit(first.clone(), |c| c.crc32c ^= 1), "layer 1, tokens 3..10: checksum is"),
        (&some, narrow, "layer 1, tokens 10..20: rows of the form"),
    ];
    for (before, chunk, said) in cases {
        let status = refusal(before, chunk);
        assert_eq!(status.code(), Code::DataLoss, "{said}: {status}");
        assert!(status.message().contains(said), "{said}: {status}");
        assert!(status.message().starts_with(&format!("entry {}, layer ", key())), "{status}");
    }
    let status = refusal(&[], edit(first, |c| c.key = Bytes::from_static(&[1; 32])));
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    assert!(status.message().contains("a chunk of another entry"), "{status}");
}

/// A layer is bounded as a whole, not only each of its ranges.
#[test]
fn ranges_add_up_to_the_limit() {
    let (first, second) = (range(1, 3..10), range(1, 10..17));
    let mut assembly = Assembly::new(key(), LAYOUT.into(), BODY, first.part_bytes + 1);
    assembly.take(first).expect("it fits");
    let status = assembly.take(second).map(|_| ()).expect_err("it does not");
    assert!(status.message().contains("layer 1, tokens 10..17: 1152 bytes in the layer, at most 577"), "{status}");
}

#[test]
fn an_end_too_early_names_what_is_missing() {
    let mut assembly = empty();
    let missing = |assembly: &Assembly, said: &str| {
        let status = assembly.finish().expect_err(said);
        assert_eq!(status.code(), Code::DataLoss);
        let said = format!("entry {}, {said}", key());
        assert!(status.message().starts_with(&said), "{said}: {status}");
    };
    let ended = |whole: usize| format!("missing; the transfer ended with {whole} of 3 layers whole");
    missing(&assembly, &format!("layer 0, tokens 3..40: {}", ended(0)));
    assembly.take(chunks(0, BODY, &recurrent(), usize::MAX).remove(0)).expect("good");
    missing(&assembly, &format!("layer 1, tokens 3..40: {}", ended(1)));
    assembly.take(range(1, 3..10)).expect("good");
    assembly.take(range(1, 20..40)).expect("good");
    missing(&assembly, &format!("layer 1, tokens 10..20: {}", ended(1)));
    assembly.take(range(2, 10..40)).expect("good");
    assembly.take(range(1, 10..20)).expect("good");
    missing(&assembly, &format!("layer 2, tokens 3..10: {}", ended(2)));
    assembly.take(chunks(2, 3..10, &kv(2, 3..10), 100).remove(0)).expect("good");
    missing(&assembly, &format!("layer 2, tokens 3..10: {}", ended(2)));
}
