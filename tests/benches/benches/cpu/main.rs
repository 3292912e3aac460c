//! Measurements of the CPU path; see [`hypic_benches`].

mod decode;
mod parts;
mod ttft;
mod workers;

use anyhow::Result;
use hypic_benches::{Subject, chosen};

fn main() -> Result<()> {
    // `cargo test --all-targets` runs this too; only `cargo bench` says so.
    if !std::env::args().any(|a| a == "--bench") {
        println!("nothing is measured without --bench: `cargo bench -p hypic-benches`");
        return Ok(());
    }
    type Measure = fn(&[Subject]) -> Result<()>;
    let all: [(&str, Measure); 4] = [
        ("ttft", ttft::measure),
        ("parts", parts::measure),
        ("workers", workers::measure),
        ("decode", decode::measure),
    ];
    let (measures, subjects) = chosen(&all.map(|(name, _)| name))?;
    for (name, measure) in all {
        if measures.contains(&name) {
            measure(&subjects)?;
        }
    }
    Ok(())
}
