//! Keys, and the in-memory store of entries and prefix states.
//!
//! [`EntryKey`] and [`PrefixChain`] name what is cached. [`Store`] keeps it within a bound in bytes,
//! hands out guards ([`Pinned`]) and makes concurrent requests for the same missing entry share one
//! computation: the first [`Claim`] leads, the others follow its [`Flight`] layer by layer.
#![forbid(unsafe_code)]

mod changes;
mod flight;
mod keys;
mod lead;
mod ledger;
mod pinned;
mod policy;
mod prefix;
mod stats;
mod store;
#[cfg(test)]
mod tests;

pub use changes::{Change, Lagged, Watch};
pub use flight::{Flight, Source, Waker};
pub use keys::{EntryKey, Fingerprint, KeySpace};
pub use lead::Lead;
pub use pinned::Pinned;
pub use prefix::{PrefixChain, PrefixKey, PrefixKind};
pub use stats::Stats;
pub use store::{Claim, Store, StoreConfig};
