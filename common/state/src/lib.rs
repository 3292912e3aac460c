//! What a hybrid model remembers of a stretch of tokens: transition operators, recurrent states,
//! K and V, and the entries that hold them.
//!
//! The types are generic over a [`Storage`], the memory that holds the numbers: [`Host`] here (the
//! form that travels and is stored), a backend's device memory elsewhere. The codec ([`codec`]) is
//! both the wire and the disk format of [`Host`] parts.
#![forbid(unsafe_code)]

mod algebra;
pub mod codec;
mod dtype;
mod host;
mod part;
mod transition;

pub use algebra::TransitionError;
pub use dtype::DType;
pub use host::{Host, HostKv, HostTensor};
pub use part::{
    Entry, EntryError, EntryLayout, LayerKind, LayerPart, PartSource, PartState, RecurrentPart, Storage, Stored,
};
pub use transition::{ComposeRule, DECAYED, Dense, Transition};
