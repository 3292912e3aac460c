//! What prefill and composition are made of: rows, T and S, one more warm segment.

use anyhow::Result;
use hypic_benches::{Clock, Direct, Prompts, Size, Subject, Table, alternate, cores};
use hypic_state::DType;

const SEAM: usize = 8;
const QUERY: usize = 64;
/// Tokens of the segments whose composition is compared with computing them.
const SEGMENT: usize = 1024;
/// Segments of the smaller and the larger prompt.
const FEW: usize = 2;
const MANY: usize = 6;
/// Tokens of the isolated prefills.
const ISOLATED: usize = 512;
/// Prefills of a turn: the system counts a thread's time in ticks of milliseconds.
const PREFILLS: usize = 5;
/// Compositions for each ordinary forward, which takes so much longer.
const WARM: usize = 5;

pub fn measure(subjects: &[Subject]) -> Result<()> {
    for subject in subjects {
        composing(subject)?;
        let mut table = Table::new(["model", "kept", "rows alone", "with T and S", "share", "tokens/s"]);
        capturing(subject, "as initialised", &mut table)?;
        if subject.name == "synthetic" {
            let size = Size { decay: 0.01, ..Size::of_0_8b(4) };
            let slow = Subject { checkpoint: size.checkpoint()?, ..*subject };
            capturing(&slow, "slow decay", &mut table)?;
        }
        table.print(&format!(
            "{PREFILLS} isolated prefills of {ISOLATED} tokens in ms of a core, median (least); one thread"
        ));
    }
    Ok(())
}

/// One more warm segment against computing it: what the larger prompt costs more than the smaller one, either way.
fn composing(subject: &Subject) -> Result<()> {
    let direct = Direct::load(cores(), &subject.checkpoint, subject.dtype)?;
    let mut prompts = Prompts::new(direct.vocab());
    let anchor = prompts.anchor().to_vec();
    let segments = prompts.segments(MANY, SEGMENT);
    let query = prompts.ids(QUERY);
    let entries: Vec<_> = segments.iter().map(|s| direct.entry(s, SEAM, &anchor)).collect();
    let compose = |n: usize| drop(direct.run(direct.empty(), direct.composition(&entries[..n], &query)));
    let compute = |n: usize| drop(direct.forward(direct.empty(), &[&segments[..n].concat()[..], &query].concat()));
    let [compose_few, compose_many, compute_few, compute_many] = alternate(
        Clock::Wall,
        subject.rounds,
        [
            &mut || (0..WARM).for_each(|_| compose(FEW)),
            &mut || (0..WARM).for_each(|_| compose(MANY)),
            &mut || compute(FEW),
            &mut || compute(MANY),
        ],
    );
    let one_more = |few: f64, many: f64| (many - few) / (MANY - FEW) as f64;
    let composed = one_more(compose_few.min(), compose_many.min()) / WARM as f64;
    let computed = one_more(compute_few.min(), compute_many.min());
    let mut table = Table::new(["", "2 segments", "6 segments", "one more", "ratio"]);
    table.row([
        format!("composed, {WARM} times"),
        compose_few.to_string(),
        compose_many.to_string(),
        format!("{composed:.3}"),
        format!("1:{:.1}", computed / composed),
    ]);
    table.row([
        "computed".to_string(),
        compute_few.to_string(),
        compute_many.to_string(),
        format!("{computed:.2}"),
        String::new(),
    ]);
    let (name, kernels) = (subject.name, direct.kernels());
    table.print(&format!(
        "{SEGMENT}-token segments and a query in ms, median (least); {name}, {kernels}, {} threads",
        cores()
    ));
    Ok(())
}

/// The isolated prefill with and without T and S.
fn capturing(subject: &Subject, what: &str, table: &mut Table) -> Result<()> {
    let direct = Direct::load(1, &subject.checkpoint, subject.dtype)?;
    let mut prompts = Prompts::new(direct.vocab());
    let anchor = prompts.anchor().to_vec();
    let ids = prompts.ids(ISOLATED);
    let (kept, all) = direct.kept_operators(&direct.entry(&ids, SEAM, &anchor));
    let [rows, entry] = alternate(
        Clock::Thread,
        subject.rounds,
        [&mut || (0..PREFILLS).for_each(|_| direct.isolated_rows(&ids, SEAM, &anchor)), &mut || {
            (0..PREFILLS).for_each(|_| drop(direct.entry(&ids, SEAM, &anchor)))
        }],
    );
    let dtype: DType = subject.dtype;
    table.row([
        format!("{} {dtype}, {what}", subject.name),
        format!("{kept} of {all} T"),
        rows.to_string(),
        entry.to_string(),
        format!("{:.1} %", 100.0 * (1.0 - rows.min() / entry.min())),
        format!("{:.0}", (PREFILLS * (ISOLATED + anchor.len())) as f64 / entry.min() * 1e3),
    ]);
    Ok(())
}
