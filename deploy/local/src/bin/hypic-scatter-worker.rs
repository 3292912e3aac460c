//! The program `hypic-scatter-worker`: what `hypic scatter-worker` is, by itself.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use hypic::cli::{Role, role_program};

fn main() -> ExitCode {
    role_program(Role::ScatterWorker)
}
