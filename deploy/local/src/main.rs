//! The `hypic` program.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    hypic::cli::program()
}
