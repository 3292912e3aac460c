//! Tokens a second once the first is there, alone and in a batch, behind composed prompts of two lengths.

use std::time::Duration;

use anyhow::Result;
use hypic_benches::{Asked, Prompts, Served, Subject, Table, Times, cores};
use hypic_router::Mode;

const DOCUMENT: usize = 512;
const QUERY: usize = 64;
const TOKENS: u32 = 33;
const BATCHES: [u32; 2] = [1, 8];

pub fn measure(subjects: &[Subject]) -> Result<()> {
    for subject in subjects {
        let served = Served::start(subject, 1, cores())?;
        let mut prompts = Prompts::new(served.vocab());
        let mut table = Table::new(["prompt", "answers", "ms a step", "tokens/s"]);
        for documents in [0, 8] {
            let (system, documents) = (prompts.ids(DOCUMENT), prompts.segments(documents, DOCUMENT));
            let query = prompts.ids(QUERY);
            let mut times = [Times::default(), Times::default()];
            for round in 0..=subject.rounds {
                for (answers, times) in BATCHES.into_iter().zip(&mut times) {
                    let (_, report) = served.ask(&Asked {
                        prompt: prompts.prompt(&system, &documents, &query),
                        mode: Mode::Hypic,
                        salt: String::new(),
                        tokens: TOKENS,
                        answers,
                    })?;
                    let t = report.timings_ms;
                    if round > 0 {
                        times.add(Duration::from_secs_f64((t.total - t.first_token) / 1e3 / f64::from(TOKENS - 1)));
                    }
                }
            }
            for (answers, times) in BATCHES.into_iter().zip(&times) {
                table.row([
                    format!("{} tokens", (documents.len() + 1) * DOCUMENT + QUERY),
                    answers.to_string(),
                    times.to_string(),
                    format!("{:.0}", f64::from(answers) / times.min() * 1e3),
                ]);
            }
        }
        table.print(&format!(
            "decoding, median (least); {}, {:?}, {}, {} threads",
            subject.name,
            subject.dtype,
            served.kernels(),
            cores()
        ));
    }
    Ok(())
}
