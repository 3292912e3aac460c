//! What a store has done and holds.

/// A snapshot. The first group is of the moment, the others count from the store's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bound, in bytes.
    pub capacity: usize,
    /// Bytes held: `entry_bytes + prefix_bytes`, never above the bound.
    pub bytes: usize,
    /// Bytes of entries, pinned ones included.
    pub entry_bytes: usize,
    /// Bytes of pinned entries.
    pub pinned_bytes: usize,
    /// Bytes of prefix states.
    pub prefix_bytes: usize,
    /// Entries held.
    pub entries: usize,
    /// Entries held that are in use.
    pub pinned: usize,
    /// Prefix states held.
    pub prefix_states: usize,
    /// Entries in the making.
    pub flights: usize,

    /// Entries asked for and found.
    pub hits: u64,
    /// Entries asked for and not found.
    pub misses: u64,
    /// Requests that follow the computation of another.
    pub joins: u64,
    /// Entries or flights under the key asked for but with other token ids; these are misses too.
    pub hash_mismatches: u64,
    /// Prefix states asked for and found.
    pub prefix_hits: u64,
    /// Prompts without a prefix state.
    pub prefix_misses: u64,

    /// Entries that went because others are worth more.
    pub evicted_entries: u64,
    /// Prefix states before a query or at an end that went because others are worth more.
    pub evicted_prefix_states: u64,
    /// Prefix states at boundaries that went because room was needed.
    pub thinned_boundaries: u64,

    /// Entries and prefix states not kept because they exceed the whole bound.
    pub rejected_too_large: u64,
    /// Not kept because all that is there is worth more.
    pub rejected_low_value: u64,
    /// Not kept because what is there is in use, or may not go for a boundary's sake.
    pub rejected_no_room: u64,
    /// Computations that failed or were abandoned.
    pub failed_flights: u64,
}
