//! Prefix states as the store keeps them, and the book of their lengths.
//!
//! A continued prompt starts in the middle of nowhere: no boundary of the new prompt lies where the
//! old one ended. So a combiner tells at which lengths it has states, and the router looks there.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use hypic_cache::PrefixKey;
use hypic_kernels::Backend;
use hypic_model::FrozenState;
use hypic_state::Stored;
use hypic_transport::grpc::PrefixNote;
use parking_lot::Mutex;

/// A running state under the key of everything before it.
pub struct PrefixState<B: Backend> {
    pub(crate) frozen: FrozenState<B>,
    /// Tokens it covers.
    pub(crate) tokens: usize,
    /// Of those, the leading ones of which every row was ordinary.
    pub(crate) exact: usize,
    listed: Listing,
}

impl<B: Backend> PrefixState<B> {
    pub(crate) fn new(frozen: FrozenState<B>, tokens: usize, exact: usize, lengths: &Lengths, root: PrefixKey) -> Self {
        PrefixState { frozen, tokens, exact, listed: lengths.list(root, tokens) }
    }

    /// What a router's directory knows it by.
    pub fn note(&self) -> PrefixNote {
        PrefixNote { root: self.listed.root, tokens: self.tokens, exact: self.exact }
    }
}

impl<B: Backend> Stored for PrefixState<B> {
    fn bytes(&self) -> usize {
        self.frozen.bytes()
    }
}

/// How many states there are of each length, per kind of prompt.
#[derive(Clone, Default)]
pub(crate) struct Lengths {
    book: Arc<Mutex<HashMap<PrefixKey, BTreeMap<usize, usize>>>>,
}

impl Lengths {
    fn list(&self, root: PrefixKey, tokens: usize) -> Listing {
        *self.book.lock().entry(root).or_default().entry(tokens).or_default() += 1;
        Listing { lengths: self.clone(), root, tokens }
    }

    /// The lengths of prompts whose chain begins with `root`, ascending.
    pub fn of(&self, root: PrefixKey) -> Vec<usize> {
        self.book.lock().get(&root).map(|counts| counts.keys().copied().collect()).unwrap_or_default()
    }
}

/// One state's line in the book; goes with it.
struct Listing {
    lengths: Lengths,
    root: PrefixKey,
    tokens: usize,
}

impl Drop for Listing {
    fn drop(&mut self) {
        let mut book = self.lengths.book.lock();
        let Some(counts) = book.get_mut(&self.root) else { return };
        if let Some(count) = counts.get_mut(&self.tokens) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.tokens);
            }
        }
        if counts.is_empty() {
            book.remove(&self.root);
        }
    }
}
