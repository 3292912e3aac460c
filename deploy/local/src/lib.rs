//! All roles, in one process or as processes of a cluster: what the `hypic` program is made of.
#![forbid(unsafe_code)]

pub mod assembly;
pub mod cli;
pub mod config;
pub mod roles;
mod served;
pub mod source;
pub mod up;
