//! Keys of entries: who may share an entry with whom.
//!
//! Owns the bytes that are hashed. What can go wrong is that two different things get one key; every
//! field is therefore framed (fixed width, or its length first), every kind of key has a hashing
//! context of its own, and users of a key compare token ids as well.

use std::fmt;

use hypic_state::DType;
use hypic_state::codec::FORMAT_VERSION;

/// Context of the hash of entry keys; see BLAKE3's key derivation mode.
const ENTRY_CONTEXT: &str = "hypic entry key v1";

/// Identity of a model: a hash over all that its results depend on (weights, configuration).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub [u8; 32]);

/// What all keys of one loaded model have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeySpace {
    /// The model.
    pub fingerprint: Fingerprint,
    /// Type it computes in.
    pub dtype: DType,
    /// Version of the format of entries.
    pub format: u16,
}

impl KeySpace {
    /// The keys of `fingerprint` computing in `dtype`, in the format of this program.
    pub fn new(fingerprint: Fingerprint, dtype: DType) -> Self {
        KeySpace { fingerprint, dtype, format: FORMAT_VERSION }
    }
}

/// Key of an entry: BLAKE3 over format version, model, data type, `w`, anchor, salt and token ids.
/// Nothing in it is positional.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryKey([u8; 32]);

impl EntryKey {
    /// Key of the segment `tokens` with a seam of `w` tokens behind `anchor` (empty for none).
    /// Tenants with different `salt`s share nothing.
    pub fn new(space: &KeySpace, w: usize, anchor: &[u32], salt: &[u8], tokens: &[u32]) -> Self {
        let mut framer = Framer::new(ENTRY_CONTEXT, space);
        framer.number(w);
        framer.tokens(anchor);
        framer.bytes(salt);
        framer.tokens(tokens);
        EntryKey(framer.hash())
    }

    /// The key in the form in which it travels.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// A key that has travelled.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        EntryKey(bytes)
    }
}

/// Feeds fields to a hash such that no two lists of fields give the same bytes.
#[derive(Clone)]
pub(crate) struct Framer(blake3::Hasher);

impl Framer {
    /// Tokens that are handed to the hash at once: enough to keep all of its lanes busy.
    const CHUNK: usize = 4096;

    pub(crate) fn new(context: &str, space: &KeySpace) -> Self {
        let mut framer = Framer(blake3::Hasher::new_derive_key(context));
        framer.0.update(&space.format.to_le_bytes());
        framer.0.update(&space.fingerprint.0);
        framer.bytes(space.dtype.to_string().as_bytes());
        framer
    }

    pub(crate) fn tag(&mut self, tag: u8) {
        self.0.update(&[tag]);
    }

    pub(crate) fn number(&mut self, value: usize) {
        self.0.update(&(value as u64).to_le_bytes());
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len());
        self.0.update(bytes);
    }

    pub(crate) fn tokens(&mut self, tokens: &[u32]) {
        const EACH: usize = 4;
        self.number(tokens.len());
        let mut bytes = [0; EACH * Self::CHUNK];
        for tokens in tokens.chunks(Self::CHUNK) {
            for (out, token) in bytes.chunks_exact_mut(EACH).zip(tokens) {
                out.copy_from_slice(&token.to_le_bytes());
            }
            self.0.update(&bytes[..EACH * tokens.len()]);
        }
    }

    /// Tokens without a length, each behind `tag`.
    pub(crate) fn tagged_tokens(&mut self, tag: u8, tokens: &[u32]) {
        const EACH: usize = 5;
        let mut bytes = [tag; EACH * Self::CHUNK];
        for tokens in tokens.chunks(Self::CHUNK) {
            for (out, token) in bytes.chunks_exact_mut(EACH).zip(tokens) {
                out[1..].copy_from_slice(&token.to_le_bytes());
            }
            self.0.update(&bytes[..EACH * tokens.len()]);
        }
    }

    pub(crate) fn hash(&self) -> [u8; 32] {
        *self.0.finalize().as_bytes()
    }
}

/// Hexadecimal, as keys and fingerprints are shown.
pub(crate) fn write_hex(bytes: &[u8; 32], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(&self.0, f)
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

impl fmt::Display for EntryKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(&self.0, f)
    }
}

impl fmt::Debug for EntryKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EntryKey({self})")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_field_counts_and_none_runs_into_the_next() {
        let space = KeySpace::new(Fingerprint([7; 32]), DType::F32);
        let key = |space: &KeySpace, w, anchor: &[u32], salt: &[u8], tokens: &[u32]| {
            EntryKey::new(space, w, anchor, salt, tokens)
        };
        let keys = [
            key(&space, 8, &[1], b"a", &[2, 3]),
            key(&KeySpace { fingerprint: Fingerprint([8; 32]), ..space }, 8, &[1], b"a", &[2, 3]),
            key(&KeySpace { dtype: DType::Bf16, ..space }, 8, &[1], b"a", &[2, 3]),
            key(&KeySpace { format: space.format + 1, ..space }, 8, &[1], b"a", &[2, 3]),
            key(&space, 9, &[1], b"a", &[2, 3]),
            key(&space, 8, &[], b"a", &[2, 3]),
            key(&space, 8, &[1, 2], b"a", &[3]),
            key(&space, 8, &[1], b"", &[2, 3]),
            key(&space, 8, &[1], b"b", &[2, 3]),
            key(&space, 8, &[1], b"a", &[3, 2]),
            key(&space, 8, &[1], b"a", &[2, 3, 0]),
            key(&space, 8, &[1], b"a\x02\0\0\0", &[3]),
            key(&space, 8, &[1], b"a", &[]),
        ];
        assert_eq!(keys.iter().collect::<HashSet<_>>().len(), keys.len());
        assert_eq!(keys[0], key(&space, 8, &[1], b"a", &[2, 3]));
        assert_eq!(EntryKey::from_bytes(*keys[0].as_bytes()), keys[0]);
        assert_eq!(keys[0].to_string().len(), 64);
    }

    #[test]
    fn long_segments_are_hashed_whole() {
        let space = KeySpace::new(Fingerprint([0; 32]), DType::F32);
        let tokens: Vec<u32> = (0..5000).collect();
        let all = EntryKey::new(&space, 0, &[], b"", &tokens);
        for at in [0, 1023, 1024, 2048, 4999] {
            let mut other = tokens.clone();
            other[at] += 1;
            assert_ne!(EntryKey::new(&space, 0, &[], b"", &other), all, "token {at}");
        }
    }
}
