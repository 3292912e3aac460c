//! The program `hypic-combiner`: what `hypic combiner` is, by itself.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use hypic::cli::{Role, role_program};

fn main() -> ExitCode {
    role_program(Role::Combiner)
}
