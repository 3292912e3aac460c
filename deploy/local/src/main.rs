//! The `hypic` program.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use hypic::cli::{Cli, run};

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
