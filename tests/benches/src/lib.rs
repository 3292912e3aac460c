//! What the benchmarks share: models of any size, ways to run them, and a table of times.
//!
//! Every benchmark measures what it compares in one run, in turns, and prints medians with the least time beside:
//! on a machine with other load the ratios of least times are what to read. `cargo bench -p hypic-benches --bench NAME
//! [-- MODEL...]`; without a model's name it takes all of them.
#![forbid(unsafe_code)]

mod direct;
mod served;
mod synthetic;
mod times;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use hypic_kernels::{Backend, Cpu};
use hypic_model::Checkpoint;
use hypic_state::DType;

pub use direct::Direct;
pub use served::{Asked, Prompts, Served};
pub use synthetic::Size;
pub use times::{Table, Times, alternate};

/// A model to measure.
pub struct Subject {
    /// Its name on the command line.
    pub name: &'static str,
    /// Its files.
    pub checkpoint: Checkpoint,
    /// Dtype in which it is computed.
    pub dtype: DType,
    /// Repetitions of a measurement.
    pub rounds: usize,
}

/// The models that the command line names, or all: `demo`, the trained model of the repository, and `synthetic`, of
/// random weights and with layers of production size.
///
/// # Errors
/// If a model cannot be read, a name is unknown, or the kernels are built to fill buffers with NaN.
pub fn subjects() -> Result<Vec<Subject>> {
    let poisoned = Cpu::new(1).alloc(&[1]).data()[0].is_nan();
    if poisoned {
        bail!("hypic-kernels is built with `poison`: run the benchmarks by `cargo bench -p hypic-benches` alone");
    }
    let asked: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let names = ["demo", "synthetic"];
    if let Some(unknown) = asked.iter().find(|a| !names.contains(&a.as_str())) {
        bail!("there is no model '{unknown}': use {}", names.join(" or "));
    }
    let chosen = names.into_iter().filter(|n| asked.is_empty() || asked.iter().any(|a| a == n));
    chosen.map(subject).collect()
}

fn subject(name: &'static str) -> Result<Subject> {
    let (checkpoint, dtype, rounds) = match name {
        "demo" => {
            let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
            let checkpoint = Checkpoint::open(&dir).context("the demo model")?;
            (checkpoint, DType::Bf16, 9)
        }
        _ => (Size::half_0_8b().checkpoint()?, DType::F32, 3),
    };
    Ok(Subject { name, checkpoint, dtype, rounds })
}

/// Cores of this machine.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}
