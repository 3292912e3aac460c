//! Pieces of descriptions that several families share: readers of configuration keys, and the layers that more than
//! one family has. A family's file says only what is its own. What can go wrong here is a reader that takes a default
//! where the configuration says something under another name: so every spelling that releases use is read, and two
//! that disagree are refused. Where `layer_types` disagrees with a rule for the layers (every fourth, groups of five)
//! the list counts, and the difference is told.

pub(super) mod attention;
pub(super) mod layout;
pub(super) mod lightning;
pub(super) mod mamba2;
pub(super) mod mla;
pub(super) mod moe;
pub(super) mod read;
pub(super) mod recurrent;
pub(super) mod trunk;

pub(super) use attention::{Heads, attention};
pub(super) use trunk::{Defaults, Module, Trunk};
