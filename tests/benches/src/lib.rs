//! What the benchmarks share: models of any size, ways to run them, and a table of times.
//!
//! Every benchmark measures what it compares in one run, in turns, and prints medians with the least time beside:
//! on a machine with other load the ratios of least times are what to read.
//! `cargo bench -p hypic-benches [-- NAME...]`, the names being those of measurements (`ttft`, `parts`, `workers`,
//! `decode`) and models (`demo`, the trained model of the repository; `synthetic`, of random weights, with layers of
//! production size); of either kind all, if none is named.
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
pub use times::{Clock, Table, Times, alternate};

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

/// Names of the models.
const MODELS: [&str; 2] = ["demo", "synthetic"];

/// The measurements, of `all`, and the models that the command line names.
///
/// # Errors
/// If a model cannot be read, a name is unknown, or the kernels are built to fill buffers with NaN.
pub fn chosen<'a>(all: &[&'a str]) -> Result<(Vec<&'a str>, Vec<Subject>)> {
    let poisoned = Cpu::new(1).alloc(&[1]).data()[0].is_nan();
    if poisoned {
        bail!("hypic-kernels is built with `poison`: run the benchmarks by `cargo bench -p hypic-benches` alone");
    }
    let asked: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let known = |name: &str| all.contains(&name) || MODELS.contains(&name);
    if let Some(unknown) = asked.iter().find(|a| !known(a)) {
        let names = [all, &MODELS].concat();
        bail!("there is no '{unknown}': use some of {}", names.join(", "));
    }
    let models = named(&MODELS, &asked).into_iter().map(subject).collect::<Result<_>>()?;
    Ok((named(all, &asked), models))
}

/// Those of `names` that were asked for, or all if none was.
fn named<'a>(names: &[&'a str], asked: &[String]) -> Vec<&'a str> {
    let some: Vec<&str> = names.iter().copied().filter(|n| asked.iter().any(|a| a == n)).collect();
    if some.is_empty() { names.to_vec() } else { some }
}

fn subject(name: &'static str) -> Result<Subject> {
    let (checkpoint, dtype, rounds) = match name {
        "demo" => {
            let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
            let checkpoint = Checkpoint::open(&dir).context("the demo model")?;
            (checkpoint, DType::Bf16, 9)
        }
        _ => (Size::of_0_8b(4).checkpoint()?, DType::F32, 3),
    };
    Ok(Subject { name, checkpoint, dtype, rounds })
}

/// Cores of this machine.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}
