//! All roles, in one process or as processes of a cluster: what the `hypic` program is made of.
#![forbid(unsafe_code)]

pub mod assembly;
pub mod cli;
pub mod config;
mod dtype;
pub mod roles;
mod served;
pub mod source;
pub mod up;

pub use dtype::{ComputeDType, UnknownDType};
