//! Keys of prefix states: the running state behind a sequence of tokens.
//!
//! Owns the chained hash. Rows that an ordinary pass computed and segments that were composed leave
//! different states behind, so they are told apart; how rows were cut into calls is not.

use std::fmt;

use hypic_state::ComposeRule;

use crate::keys::{Framer, KeySpace, write_hex};

/// Context of the hash of prefix keys; see BLAKE3's key derivation mode.
const PREFIX_CONTEXT: &str = "hypic prefix key v1";

/// In front of every ordinary row's token.
const ROW: u8 = 0;
/// In front of every composed segment.
const SEGMENT: u8 = 1;

/// Key of the running state behind all tokens before a point of a prompt.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PrefixKey([u8; 32]);

/// The keys along one prompt. It is extended by what stands in the prompt, and has a key at each point.
#[derive(Clone)]
pub struct PrefixChain(Framer);

impl PrefixChain {
    /// The empty prompt under the settings that its state depends on. `mode` is any number that tells
    /// modes apart, `rule`, `w` and `anchor` are those of composed segments; tenants with different
    /// `salt`s share nothing.
    pub fn new(space: &KeySpace, mode: u8, rule: ComposeRule, w: usize, anchor: &[u32], salt: &[u8]) -> Self {
        let mut framer = Framer::new(PREFIX_CONTEXT, space);
        framer.tag(mode);
        framer.bytes(rule.to_string().as_bytes());
        framer.number(w);
        framer.tokens(anchor);
        framer.bytes(salt);
        PrefixChain(framer)
    }

    /// Appends ordinary rows. Two calls are the same as one with the tokens of both.
    pub fn rows(&mut self, tokens: &[u32]) -> &mut Self {
        self.0.tagged_tokens(ROW, tokens);
        self
    }

    /// Appends one composed segment: its seam and the jump over its body.
    pub fn segment(&mut self, tokens: &[u32]) -> &mut Self {
        self.0.tag(SEGMENT);
        self.0.tokens(tokens);
        self
    }

    /// Key of the state behind everything so far.
    pub fn key(&self) -> PrefixKey {
        PrefixKey(self.0.hash())
    }
}

/// Where in a prompt a prefix state stands, which decides how long it is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PrefixKind {
    /// At a boundary between segments or messages: kept while nothing else needs the room.
    Boundary,
    /// Right before the query: kept by its worth, as entries are.
    Query,
    /// At the end of the prompt: kept by its worth, as entries are.
    End,
}

impl PrefixKey {
    /// The key in the form in which it travels.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// A key that has travelled.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        PrefixKey(bytes)
    }
}

impl fmt::Display for PrefixKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(&self.0, f)
    }
}

impl fmt::Debug for PrefixKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrefixKey({self})")
    }
}

impl fmt::Debug for PrefixChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrefixChain({})", self.key())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use hypic_state::DType;

    use super::*;
    use crate::Fingerprint;

    fn space() -> KeySpace {
        KeySpace::new(Fingerprint([1; 32]), DType::F32)
    }

    fn chain() -> PrefixChain {
        PrefixChain::new(&space(), 0, ComposeRule::Transition, 8, &[5], b"")
    }

    #[test]
    fn rows_have_the_same_key_however_they_are_cut() {
        let tokens: Vec<u32> = (0..3000).collect();
        let whole = chain().rows(&tokens).key();
        for cut in [0, 1, 2, 819, 820, 1500, 3000] {
            let mut two = chain();
            two.rows(&tokens[..cut]).rows(&[]).rows(&tokens[cut..]);
            assert_eq!(two.key(), whole, "cut at {cut}");
        }
        let mut single = chain();
        tokens.iter().for_each(|token| {
            single.rows(&[*token]);
        });
        assert_eq!(single.key(), whole);
    }

    #[test]
    fn what_stands_in_the_prompt_decides() {
        let keys = [
            chain().key(),
            chain().rows(&[1, 2]).key(),
            chain().rows(&[1]).key(),
            chain().segment(&[1, 2]).key(),
            chain().segment(&[1]).segment(&[2]).key(),
            chain().segment(&[1]).rows(&[2]).key(),
            chain().rows(&[1]).segment(&[2]).key(),
            chain().segment(&[]).key(),
            chain().segment(&[]).segment(&[]).key(),
            chain().rows(&[2, 1]).key(),
            PrefixChain::new(&space(), 1, ComposeRule::Transition, 8, &[5], b"").rows(&[1, 2]).key(),
            PrefixChain::new(&space(), 0, ComposeRule::Add, 8, &[5], b"").rows(&[1, 2]).key(),
            PrefixChain::new(&space(), 0, ComposeRule::Transition, 9, &[5], b"").rows(&[1, 2]).key(),
            PrefixChain::new(&space(), 0, ComposeRule::Transition, 8, &[], b"").rows(&[1, 2]).key(),
            PrefixChain::new(&space(), 0, ComposeRule::Transition, 8, &[5], b"x").rows(&[1, 2]).key(),
        ];
        assert_eq!(keys.iter().collect::<HashSet<_>>().len(), keys.len());
    }

    #[test]
    fn a_key_does_not_end_the_chain() {
        let mut chain = chain();
        let mut forked = chain.rows(&[1, 2]).clone();
        let first = chain.key();
        assert_eq!(chain.key(), first);
        assert_eq!(chain.segment(&[3]).key(), forked.segment(&[3]).key());
        assert_ne!(chain.key(), first);
    }
}
