//! A cold prompt on one and on two scatter workers of one thread each.

use anyhow::Result;
use hypic_benches::{Asked, Prompts, Served, Subject, Table, Times};
use hypic_router::Mode;

const DOCUMENTS: usize = 16;
const DOCUMENT: usize = 512;
const QUERY: usize = 64;

pub fn measure(subjects: &[Subject]) -> Result<()> {
    for subject in subjects {
        let fleets = [Served::start(subject, 1, 1)?, Served::start(subject, 2, 1)?];
        let mut prompts = Prompts::new(fleets[0].vocab());
        let documents = prompts.segments(DOCUMENTS, DOCUMENT);
        let query = prompts.ids(QUERY);
        let mut times = [Times::default(), Times::default()];
        // The first round is for the balancer, which learns how fast its workers are.
        for round in 0..=subject.rounds {
            for (served, times) in fleets.iter().zip(&mut times) {
                let (time, _) = served.ask(&Asked {
                    prompt: prompts.prompt(&documents[0], &documents[1..], &query),
                    mode: Mode::Hypic,
                    salt: round.to_string(),
                    tokens: 1,
                    answers: 1,
                })?;
                if round > 0 {
                    times.add(time);
                }
            }
        }
        let [one, two] = &times;
        let mut table = Table::new(["one worker", "two workers", "ratio"]);
        table.row([one.to_string(), two.to_string(), format!("{:.2}", one.min() / two.min())]);
        table.print(&format!(
            "time to first token of {DOCUMENTS} x {DOCUMENT} cold tokens in ms, median (least); {}",
            subject.name
        ));
    }
    Ok(())
}
