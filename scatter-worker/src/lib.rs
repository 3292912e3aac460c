//! The scatter worker: makes entries by isolated prefill, and hands out those that it holds.
//!
//! [`Worker`] answers jobs; a thread of its own owns the device and computes them, several short
//! segments in one pass. A segment that several requests miss at once is computed once.
#![forbid(unsafe_code)]

mod device;
mod interest;
mod worker;

pub use interest::Interest;
pub use worker::{Worker, WorkerConfig};
