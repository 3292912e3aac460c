//! Tests of the store over a memory that holds nothing.

mod changes;
mod claims;
mod hammer;
mod prefixes;
mod pressure;

use std::sync::Arc;
use std::time::Duration;

use hypic_state::{DType, EntryLayout, LayerKind, LayerPart, RecurrentPart, Storage, Stored, Transition};

use crate::{Claim, EntryKey, Fingerprint, KeySpace, Lead, Pinned, Store, StoreConfig};

/// A memory in which a tensor is its size and a mark.
struct Dummy;

#[derive(Debug, PartialEq)]
struct Block {
    bytes: usize,
    mark: u32,
}

impl Storage for Dummy {
    type Tensor = Block;
    type Kv = Block;
}

impl Stored for Block {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

type TestStore = Store<Dummy, Block>;

fn store(capacity_bytes: usize) -> TestStore {
    Store::new(StoreConfig { capacity_bytes })
}

fn layout() -> EntryLayout {
    vec![LayerKind::Recurrent, LayerKind::Attention].into()
}

/// Tokens of the segment number `n`, a body of one token behind a seam of one.
fn tokens(n: u32) -> Arc<[u32]> {
    vec![7, n].into()
}

const SEAM: usize = 1;
const TOKEN_BYTES: usize = 8;

fn key(n: u32) -> EntryKey {
    let space = KeySpace::new(Fingerprint([0; 32]), DType::F32);
    EntryKey::new(&space, SEAM, &[], b"", &tokens(n))
}

fn recurrent(mark: u32, bytes: usize) -> LayerPart<Dummy> {
    LayerPart::Recurrent(RecurrentPart {
        transition: Transition::Scalar(Block { bytes: 0, mark }),
        state: Block { bytes, mark },
        tail: None,
    })
}

fn attention(mark: u32, bytes: usize) -> LayerPart<Dummy> {
    LayerPart::Attention(Block { bytes, mark })
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Computes the entry that is led, `bytes` bytes in all.
fn compute(lead: Lead<Dummy>, n: u32, bytes: usize, cost: u64) -> Pinned<Dummy> {
    assert!(lead.publish(0, recurrent(n, 1)));
    assert!(lead.publish(1, attention(n, bytes - TOKEN_BYTES - 1)));
    let entry = lead.complete(&layout(), seconds(cost)).unwrap();
    assert_eq!(entry.bytes(), bytes);
    entry
}

fn claim<P: Stored>(store: &Store<Dummy, P>, n: u32) -> Claim<Dummy> {
    store.claim(key(n), &tokens(n), SEAM)
}

fn lead<P: Stored>(store: &Store<Dummy, P>, n: u32) -> Lead<Dummy> {
    match claim(store, n) {
        Claim::Lead(lead) => lead,
        other => panic!("segment {n} should be missing: {other:?}"),
    }
}

fn hit<P: Stored>(store: &Store<Dummy, P>, n: u32) -> Pinned<Dummy> {
    match claim(store, n) {
        Claim::Hit(entry) => entry,
        other => panic!("segment {n} should be there: {other:?}"),
    }
}

/// Computes segment `n` and uses it no longer.
fn fill<P: Stored>(store: &Store<Dummy, P>, n: u32, bytes: usize, cost: u64) {
    compute(lead(store, n), n, bytes, cost);
}

/// Which of the segments are there.
fn resident<P: Stored>(store: &Store<Dummy, P>, among: std::ops::Range<u32>) -> Vec<u32> {
    among.filter(|n| store.contains(key(*n))).collect()
}
