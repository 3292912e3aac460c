//! All roles in one process: what the `hypic` program is made of.
#![forbid(unsafe_code)]

pub mod assembly;
pub mod cli;
pub mod source;
