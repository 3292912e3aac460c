//! Time to the first token of a prompt of documents: cold, warm (the same documents in another order behind another
//! system text), by a prefix cache that has seen the same prompts, and by an ordinary forward of everything.

use anyhow::Result;
use hypic_benches::{Asked, Prompts, Served, Subject, Table, Times, cores};
use hypic_router::{Mode, Usage};

const DOCUMENTS: [usize; 2] = [8, 16];
const DOCUMENT: usize = 512;
const QUERY: usize = 64;
const SYSTEM: usize = 32;
/// Warm prompts for each of the others, which take so much longer.
const WARM: usize = 3;

fn computed(usage: &Usage) -> u64 {
    usage.seam_tokens + usage.computed_tokens
}

pub fn measure(subjects: &[Subject]) -> Result<()> {
    for subject in subjects {
        let threads = cores();
        let served = Served::start(subject, threads, threads)?;
        let mut prompts = Prompts::new(served.vocab());
        let mut table =
            Table::new(["documents", "full", "cold", "prefix", "warm", "full:cold", "prefix:warm", "rows", "of it"]);
        for count in DOCUMENTS {
            let mut documents = prompts.segments(count, DOCUMENT);
            let systems = prompts.segments(2, SYSTEM);
            let ask = |system: usize, documents: &[Vec<u32>], query: &[u32], mode, salt: String| {
                served.ask(&Asked {
                    prompt: prompts.prompt(&systems[system], documents, query),
                    mode,
                    salt,
                    tokens: 1,
                    answers: 1,
                })
            };
            let mut queries = Prompts::new(served.vocab());
            let mut query = || queries.ids(QUERY);
            let [mut full, mut cold, mut prefix, mut warm] = [(); 4].map(|()| Times::default());
            let (mut prefix_rows, mut warm_rows) = (0, 0);
            for round in 0..subject.rounds {
                let salt = format!("{count}-{round}");
                cold.add(ask(0, &documents, &query(), Mode::Hypic, salt.clone())?.0);
                // The system text of what follows is known; its documents begin with another one each time.
                ask(1, &[], &query(), Mode::Hypic, salt.clone())?;
                ask(1, &[], &query(), Mode::Prefix, salt.clone())?;
                documents.rotate_left(1);
                let (time, report) = ask(1, &documents, &query(), Mode::Prefix, salt.clone())?;
                prefix.add(time);
                prefix_rows = computed(&report.usage);
                for _ in 0..WARM {
                    let (time, report) = ask(1, &documents, &query(), Mode::Hypic, salt.clone())?;
                    warm.add(time);
                    warm_rows = computed(&report.usage);
                    documents.rotate_left(1);
                }
                full.add(ask(1, &documents, &query(), Mode::Full, salt)?.0);
            }
            let rows = prefix_rows as f64 / warm_rows as f64;
            let ratio = prefix.min() / warm.min();
            table.row([
                format!("{count} x {DOCUMENT}"),
                full.to_string(),
                cold.to_string(),
                prefix.to_string(),
                warm.to_string(),
                format!("{:.2}", full.min() / cold.min()),
                format!("{ratio:.1}"),
                format!("{prefix_rows}:{warm_rows} = {rows:.1}"),
                format!("{:.0} %", 100.0 * ratio / rows),
            ]);
        }
        table.print(&format!(
            "time to first token in ms, median (least); {}, {:?}, {}, {threads} threads; rows: those that prefix and warm compute",
            subject.name,
            subject.dtype,
            served.kernels()
        ));
    }
    Ok(())
}
