//! Token ids of pieces that were encoded before: documents come again and again, and encoding one costs
//! more than composing it.
//!
//! Owns a least-recently-used list, bounded in bytes. What can go wrong: one tenant learning from the time it
//! takes whether another has sent a text; so entries are only seen within their scope.

use std::sync::{Arc, Mutex, PoisonError};

use lru::LruCache;

use crate::prompt::Piece;

/// Bytes that an entry takes beside its text and ids, roughly.
const OVERHEAD: usize = 160;

/// Encoded pieces, bounded in bytes.
#[derive(Debug)]
pub struct TokenMemo {
    capacity: usize,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    pieces: LruCache<(Vec<u8>, Piece), Arc<[u32]>>,
    bytes: usize,
}

impl TokenMemo {
    /// An empty memo of at most `capacity` bytes; 0 remembers nothing.
    pub fn new(capacity: usize) -> Self {
        TokenMemo { capacity, inner: Mutex::new(Inner { pieces: LruCache::unbounded(), bytes: 0 }) }
    }

    /// The ids of `piece` in `scope`, from memory or from `encode`.
    pub(crate) fn get_or<E>(
        &self,
        scope: &[u8],
        piece: &Piece,
        encode: impl FnOnce() -> Result<Vec<u32>, E>,
    ) -> Result<Vec<u32>, E> {
        let key = (scope.to_vec(), piece.clone());
        if let Some(ids) = self.lock().pieces.get(&key) {
            return Ok(ids.to_vec());
        }
        let ids = encode()?;
        let size = weight(&key, &ids);
        if size <= self.capacity {
            let mut inner = self.lock();
            if inner.pieces.put(key, ids.as_slice().into()).is_none() {
                inner.bytes += size;
            }
            while inner.bytes > self.capacity {
                let Some((key, ids)) = inner.pieces.pop_lru() else { break };
                inner.bytes -= weight(&key, &ids);
            }
        }
        Ok(ids)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        // Every change leaves the list whole.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn weight(key: &(Vec<u8>, Piece), ids: &[u32]) -> usize {
    OVERHEAD + key.0.len() + key.1.text.len() + size_of_val(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(memo: &TokenMemo, scope: &str, text: &str, encoded: &mut u32) -> Vec<u32> {
        let piece = Piece::ordinary(text);
        let encode = || {
            *encoded += 1;
            Ok::<_, ()>(text.bytes().map(u32::from).collect())
        };
        memo.get_or(scope.as_bytes(), &piece, encode).expect("encoding succeeds")
    }

    #[test]
    fn remembers_within_a_scope_and_a_bound() {
        let memo = TokenMemo::new(3 * (OVERHEAD + 1 + 5 + 20));
        let mut encoded = 0;
        let first = get(&memo, "a", "first", &mut encoded);
        assert_eq!(get(&memo, "a", "first", &mut encoded), first);
        assert_eq!(encoded, 1);
        get(&memo, "b", "first", &mut encoded);
        assert_eq!(encoded, 2, "another scope sees nothing");
        get(&memo, "a", "other", &mut encoded);
        get(&memo, "a", "first", &mut encoded);
        get(&memo, "a", "third", &mut encoded);
        assert_eq!(encoded, 4);
        get(&memo, "a", "first", &mut encoded);
        assert_eq!(encoded, 4, "the least recently used goes first");
        get(&memo, "b", "first", &mut encoded);
        assert_eq!(encoded, 5);
        assert!(memo.lock().bytes <= memo.capacity);
    }

    #[test]
    fn a_memo_without_room_still_answers() {
        let memo = TokenMemo::new(0);
        let mut encoded = 0;
        for _ in 0..2 {
            assert_eq!(get(&memo, "", "x", &mut encoded), [120]);
        }
        assert_eq!((encoded, memo.lock().bytes), (2, 0));
    }

    #[test]
    fn what_counts_as_an_added_token_tells_pieces_apart() {
        let memo = TokenMemo::new(10_000);
        let ids = |piece: &Piece, id: u32| memo.get_or(b"", piece, || Ok::<_, ()>(vec![id])).expect("succeeds");
        assert_eq!(ids(&Piece::ordinary("<|x|>"), 1), [1]);
        assert_eq!(ids(&Piece::trusted("<|x|>"), 2), [2]);
    }
}
