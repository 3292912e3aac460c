//! What prefill and composition are made of: rows, T and S, one more warm segment.

use anyhow::Result;
use hypic_benches::{Direct, Prompts, Size, Subject, Table, alternate, cores, subjects};
use hypic_state::DType;

const SEAM: usize = 8;
const QUERY: usize = 64;
/// Tokens of the segments whose composition is compared with computing them.
const SEGMENT: usize = 1024;
/// Segments of the smaller and the larger composition.
const FEW: usize = 4;
const MANY: usize = 12;
/// Tokens of the isolated prefills.
const ISOLATED: usize = 512;

fn main() -> Result<()> {
    for subject in subjects()? {
        composing(&subject)?;
        let mut table = Table::new(["model", "kept", "rows alone", "with T and S", "share", "tokens/s"]);
        capturing(&subject, "as initialised", &mut table)?;
        if subject.name == "synthetic" {
            let size = Size { decay: 0.01, ..Size::half_0_8b() };
            let slow = Subject { checkpoint: size.checkpoint()?, ..subject };
            capturing(&slow, "slow decay", &mut table)?;
        }
        table.print(&format!("isolated prefill of {ISOLATED} tokens in ms, median (least); one thread"));
    }
    Ok(())
}

/// One more warm segment against computing it.
fn composing(subject: &Subject) -> Result<()> {
    let direct = Direct::load(cores(), &subject.checkpoint, subject.dtype)?;
    let mut prompts = Prompts::new(direct.vocab());
    let anchor = prompts.anchor().to_vec();
    let segments = prompts.segments(MANY + 1, SEGMENT);
    let query = prompts.ids(QUERY);
    let entries: Vec<_> = segments.iter().map(|s| direct.entry(s, SEAM, &anchor)).collect();
    let [few, many, row_behind] = alternate(
        subject.rounds,
        [
            &mut || drop(direct.run(direct.empty(), direct.composition(&entries[..FEW], &query))),
            &mut || drop(direct.run(direct.empty(), direct.composition(&entries[..MANY], &query))),
            &mut || drop(direct.forward(direct.empty(), &segments[MANY])),
        ],
    );
    let one_more = (many.min() - few.min()) / (MANY - FEW) as f64;
    let mut table = Table::new(["4 segments", "12 segments", "one more", "computing one", "ratio"]);
    table.row([
        few.to_string(),
        many.to_string(),
        format!("{one_more:.3}"),
        row_behind.to_string(),
        format!("1:{:.1}", row_behind.min() / one_more),
    ]);
    let (name, kernels) = (subject.name, direct.kernels());
    table.print(&format!(
        "composing {SEGMENT}-token segments and a query in ms, median (least); {name}, {kernels}, {} threads",
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
    let rounds = 2 * subject.rounds + 1;
    let [rows, entry] = alternate(
        rounds,
        [&mut || direct.isolated_rows(&ids, SEAM, &anchor), &mut || drop(direct.entry(&ids, SEAM, &anchor))],
    );
    let dtype: DType = subject.dtype;
    table.row([
        format!("{} {dtype}, {what}", subject.name),
        format!("{kept} of {all} T"),
        rows.to_string(),
        entry.to_string(),
        format!("{:.1} %", 100.0 * (1.0 - rows.min() / entry.min())),
        format!("{:.0}", (ISOLATED + anchor.len()) as f64 / entry.min() * 1e3),
    ]);
    Ok(())
}
