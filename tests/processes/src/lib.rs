//! What tests need to judge the program from outside: real processes that can be killed and stopped, a faulty network
//! between them, and a client that knows what a complete answer is.
//!
//! Depends on no crate of the program, only on the executable: `HYPIC_BIN`, or the one that stands beside the tests.
//! What can go wrong: the executable is older than the sources. `cargo build -p hypic --bin hypic` makes a new one.

#![forbid(unsafe_code)]

mod answer;
mod cluster;
mod metrics;
mod process;
mod program;
mod proxy;
mod request;
mod roles;

pub use answer::{Answer, Failure, Streaming, ask, open};
pub use cluster::{Cluster, Member, Options};
pub use hypic_test_support::until;
pub use metrics::{Samples, assert_idle, members, scrape, status};
pub use process::{Process, Signal, alive, children, signal};
pub use program::{demo_model, executable, model_with_another_tensor};
pub use proxy::{Direction, Fault, Proxy};
pub use request::{Request, tokens};
pub use roles::Roles;
