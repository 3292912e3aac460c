//! What tests of several packages need beside them: a real etcd of their own, an authority for certificates, and
//! waiting.
//!
//! Depends on no crate of the program. Everything here fails the test, by a panic that says what is missing.

#![forbid(unsafe_code)]

mod authority;
mod etcd;
mod wait;

pub use authority::{Authority, Files};
pub use etcd::{Etcd, MEMBERS};
pub use wait::{until, until_told};
