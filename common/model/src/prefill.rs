//! Cutting work into passes of bounded size.
//!
//! Isolated prefill makes an entry, and is the only thing that does: positions from 0, nothing before
//! the segment but its anchor, at the positions before 0. It is cut only where the scan's grid allows it, so
//! an entry's bytes do not depend on the size of the pieces.

use std::sync::Arc;

use hypic_kernels::{Backend, GRID};

use crate::pass::{Capture, Item, Logits, PartSink, Sequence, SequenceOutput};
use crate::{Model, RunningState};

/// The isolated prefill of one segment, a piece at a time.
pub struct Prefill<B: Backend> {
    ids: Vec<u32>,
    done: usize,
    /// Row of the body's first token.
    body: usize,
    chunk: usize,
    going: Option<(RunningState<B>, Capture<B>)>,
}

impl<B: Backend> Prefill<B> {
    /// Of the segment `tokens`, with a seam of `seam` tokens, behind `anchor`, in pieces of about `chunk` rows.
    ///
    /// # Panics
    /// If the segment has no body.
    pub fn new(
        backend: &B,
        model: &Model<B>,
        tokens: &[u32],
        seam: usize,
        anchor: &[u32],
        chunk: usize,
        sink: Arc<dyn PartSink<B>>,
    ) -> Self {
        assert!(tokens.len() > seam, "a segment of {} tokens has no body behind a seam of {seam}", tokens.len());
        let body = anchor.len() + seam;
        let state = RunningState::new(backend, model, -(anchor.len() as i64));
        let capture = Capture::new(backend, model, body, false, sink);
        Prefill { ids: [anchor, tokens].concat(), done: 0, body, chunk, going: Some((state, capture)) }
    }

    /// Rows still to be computed.
    pub fn rows_left(&self) -> usize {
        self.ids.len() - self.done
    }

    /// Whether the entry is complete.
    pub fn is_done(&self) -> bool {
        self.rows_left() == 0 && self.going.is_some()
    }

    /// Rows of the next piece.
    pub fn next_rows(&self) -> usize {
        next_cut(self.done, self.ids.len(), self.body, self.chunk) - self.done
    }

    /// The next piece, for a pass; [`put_back`](Self::put_back) what comes out.
    ///
    /// # Panics
    /// If a piece is out, or none is left.
    pub fn take(&mut self) -> Sequence<B> {
        let (state, mut capture) = self.going.take().expect("one piece at a time");
        let to = next_cut(self.done, self.ids.len(), self.body, self.chunk);
        assert!(to > self.done, "no piece is left");
        capture.last = to == self.ids.len();
        let run = self.ids[self.done..to].to_vec();
        self.done = to;
        Sequence { state, items: vec![Item::Run(run)], capture: Some(capture), logits: Logits::None }
    }

    /// The piece after its pass.
    ///
    /// # Panics
    /// If it is not this prefill's.
    pub fn put_back(&mut self, output: SequenceOutput<B>) {
        let capture = output.capture.expect("a piece of a prefill is captured");
        self.going = Some((output.state, capture));
    }
}

/// Where a pass that begins at row `done` of `total` may end: at about `chunk` rows, and only where a
/// chunk of the scan ends. The scan's grid is counted from row 0 and again from row `body`.
fn next_cut(done: usize, total: usize, body: usize, chunk: usize) -> usize {
    let target = done + chunk.max(1);
    if target >= total {
        return total;
    }
    let on_grid = |from: usize| from + (target - from) / GRID * GRID;
    let cut = if target >= body { on_grid(body) } else { on_grid(0) };
    if cut > done {
        return cut;
    }
    let next = if done < body { (done / GRID + 1) * GRID } else { body + ((done - body) / GRID + 1) * GRID };
    if done < body { next.min(body) } else { next.min(total) }
}

/// Cut a sequence's items into passes of at most `max_rows` rows (but at least one item each).
pub fn split_items<B: Backend>(items: Vec<Item<B>>, max_rows: usize) -> Vec<Vec<Item<B>>> {
    let max_rows = max_rows.max(GRID) / GRID * GRID;
    let mut passes = vec![Vec::new()];
    let mut rows = 0;
    for item in items {
        let Item::Run(mut run) = item else {
            passes.last_mut().expect("never empty").push(item);
            continue;
        };
        while rows + run.len() > max_rows {
            let room = (max_rows - rows) / GRID * GRID;
            let rest = run.split_off(room.min(run.len()));
            if !run.is_empty() {
                passes.last_mut().expect("never empty").push(Item::Run(run));
            }
            passes.push(Vec::new());
            (run, rows) = (rest, 0);
        }
        rows += run.len();
        if !run.is_empty() {
            passes.last_mut().expect("never empty").push(Item::Run(run));
        }
    }
    passes.retain(|items| !items.is_empty());
    passes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_lie_on_the_grid_and_cover_every_row() {
        for body in [0, 1, 8, 63, 64, 65, 130, 200] {
            for total in [body + 1, body + 64, body + 65, body + 500] {
                for chunk in [1, 10, 64, 100, 128, 1000] {
                    let mut done = 0;
                    while done < total {
                        let cut = next_cut(done, total, body, chunk);
                        assert!(cut > done, "{done} {total} {body} {chunk}");
                        let on_grid = if cut <= body {
                            cut.is_multiple_of(GRID) || cut == body
                        } else {
                            (cut - body).is_multiple_of(GRID)
                        };
                        assert!(on_grid || cut == total, "{done} {total} {body} {chunk}: {cut}");
                        done = cut;
                    }
                    assert_eq!(done, total);
                }
            }
        }
    }
}
