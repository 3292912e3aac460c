//! Experts: rows are grouped by expert, and each expert's weights are read once for all of its rows.
//!
//! Two rounds, with a task per expert and stretch of columns in the first and per stretch of columns in the second:
//! 1. what stands between the projections, of every row and expert that belong together, into one buffer;
//! 2. `down` of that, added to the rows. A task owns its columns of all rows and takes the experts in ascending order, so
//!    that a row's sum has one order whatever else is in the batch.
//!
//! What can go wrong is experts of different shapes, or a routing that was made for other rows: both panic.

mod route;

use std::cell::{Cell, RefCell};
use std::ops::Range;

use hypic_state::DType;

use super::linear::{self, CpuLinear, Input, Output, PANEL, TASKS_PER_THREAD};
use super::math::per_isa;
use super::pool::{Pool, Shared};
use super::rows::inner_row;
use super::{Cpu, CpuTensor, Isa};
use crate::{DeviceTensor, Expert, MlpForm};

pub use route::CpuRouting;
pub(super) use route::route;

/// Rows of an expert at a time, so that their sums stay in cache.
const BLOCK_ROWS: usize = 128;
/// Panels of a task at most, likewise; what it reads of an expert's weights stays in cache for all blocks of rows.
const TASK_PANELS: usize = 8;

thread_local! {
    /// What goes into `down`, kept for reuse.
    static INNER: Cell<Vec<u32>> = const { Cell::new(Vec::new()) };
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Buffers of a thread.
#[derive(Default)]
struct Scratch {
    /// Sums of a block of rows.
    sums: Vec<f32>,
    /// A row of what goes into `down`.
    row: Vec<f32>,
}

/// What all experts have in common.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Shape {
    hidden: usize,
    inner: usize,
    gate_up: DType,
    down: DType,
}

impl Shape {
    fn of(form: MlpForm, index: usize, expert: &Expert<Cpu>) -> Self {
        let Expert { gate_up, down } = expert;
        let (hidden, inner) = (down.n(), down.k());
        assert!(
            gate_up.k() == hidden && gate_up.n() == form.rows(inner),
            "experts: expert {index} has weights [{}, {}] and [{hidden}, {inner}]",
            gate_up.n(),
            gate_up.k()
        );
        Shape { hidden, inner, gate_up: gate_up.dtype(), down: down.dtype() }
    }
}

/// `acc += sum over the row's experts of weight * down(inner(gate_up(x)))`.
pub(super) fn experts(
    isa: Isa,
    pool: &Pool,
    form: MlpForm,
    experts: &[Expert<Cpu>],
    routing: &CpuRouting,
    x: &CpuTensor,
    acc: &mut CpuTensor,
) {
    let rows = x.rows();
    assert_eq!(x.shape(), acc.shape(), "experts add to rows of the shape of x");
    assert_eq!(routing.total, rows, "experts for rows that were not routed");
    if rows == 0 {
        return;
    }
    assert_eq!(routing.experts(), experts.len(), "experts: routed among others");
    let shape = Shape::of(form, 0, &experts[0]);
    assert_eq!(x.shape(), [rows, shape.hidden], "rows of experts of width {}", shape.hidden);
    for (index, expert) in experts.iter().enumerate() {
        assert!(
            Shape::of(form, index, expert) == shape,
            "experts: expert {index} is of another shape or dtype than the first"
        );
    }
    if shape.hidden == 0 || shape.inner == 0 {
        return;
    }
    let active: Vec<Group<'_>> = (0..experts.len())
        .map(|index| Group { expert: &experts[index], members: routing.starts[index]..routing.starts[index + 1] })
        .filter(|group| !group.members.is_empty())
        .collect();
    let row_words = linear::words(isa, shape.down, shape.inner);
    let pass = Pass { isa, pool, form, shape, routing, active, row_words };
    let mut inner = INNER.take();
    let len = routing.rows.len() * row_words;
    inner.resize(inner.len().max(len), 0);
    linear::with_words(isa, pool, shape.gate_up, x.data(), shape.hidden, |x| pass.first(x, &mut inner[..len]));
    pass.second(&inner[..len], acc);
    INNER.set(inner);
}

/// An expert that has rows.
struct Group<'a> {
    expert: &'a Expert<Cpu>,
    /// Its rows in the routing's lists.
    members: Range<usize>,
}

struct Pass<'a> {
    isa: Isa,
    pool: &'a Pool,
    form: MlpForm,
    shape: Shape,
    routing: &'a CpuRouting,
    active: Vec<Group<'a>>,
    /// Words of a row of what goes into `down`.
    row_words: usize,
}

impl Pass<'_> {
    /// Tasks that `panels` panels of each of `times` things are cut into, per thing.
    fn shares(&self, panels: usize, times: usize, flops: usize) -> usize {
        let for_threads = (self.pool.split(flops) * TASKS_PER_THREAD).div_ceil(times);
        for_threads.max(panels.div_ceil(TASK_PANELS)).min(panels)
    }

    /// What goes into `down`, a row for each row of each expert, as its kernels read it.
    fn first(&self, x: &[u32], inner: &mut [u32]) {
        let Shape { hidden, inner: width, .. } = self.shape;
        let flops = 2 * self.routing.rows.len() * hidden * self.form.rows(width);
        let panels = width.div_ceil(PANEL);
        let shares = self.shares(panels, self.active.len(), flops);
        let inner = Shared::new(inner);
        self.pool.run(self.active.len() * shares, flops, |task| {
            let panels = linear::share(panels, task % shares, shares);
            let columns = panels.start * PANEL..width.min(panels.end * PANEL);
            SCRATCH.with_borrow_mut(|scratch| self.gate_up(&self.active[task / shares], x, columns, &inner, scratch));
        });
    }

    /// Columns of one expert's rows in the first round; `columns` begin at a panel.
    fn gate_up(
        &self,
        group: &Group<'_>,
        x: &[u32],
        columns: Range<usize>,
        inner: &Shared<'_, u32>,
        scratch: &mut Scratch,
    ) {
        let Shape { hidden, inner: width, gate_up: dtype, down } = self.shape;
        let w = &group.expert.gate_up;
        // The gate's columns, if there are any, and those of `up` beside each other, each from the panel on in which they
        // begin.
        let gates = if self.form.is_gated() { columns.clone() } else { 0..0 };
        let before_up = self.form.rows(width) - width;
        let gate = panels(&gates);
        let up = panels(&(before_up + columns.start..before_up + columns.end));
        let up_at = gate.len() * PANEL;
        let sums_row = up_at + up.len() * PANEL;
        let up_first = up_at + before_up + columns.start - up.start * PANEL;
        let Scratch { sums, row: activated } = scratch;
        activated.resize(columns.len(), 0.0);
        for members in blocks(&group.members) {
            sums.resize(sums.len().max(members.len() * sums_row), 0.0);
            let input = Input {
                x,
                row: linear::words(self.isa, dtype, hidden),
                take: Some(&self.routing.rows[members.clone()]),
            };
            let to = Shared::new(sums);
            for (at, panels) in [(0, gate.clone()), (up_at, up.clone())] {
                let first_col = panels.start * PANEL;
                let output = Output { to: &to, at, row: sums_row, first_col, accumulate: false };
                // SAFETY: `sums` is this task's, and nothing else of it is in use.
                unsafe { linear::block_of(self.isa, w, input, &output, 0..members.len(), panels) };
            }
            for (member, sums) in members.zip(sums.chunks_exact(sums_row)) {
                let up = &sums[up_first..][..columns.len()];
                inner_row(self.isa, self.form, &sums[..gates.len()], up, activated);
                let start = member * self.row_words + linear::words(self.isa, down, columns.start);
                let words = linear::words(self.isa, down, columns.len());
                // SAFETY: a task has its own columns of its own expert's rows; they begin at a panel, so that no pair
                // of numbers is in two tasks.
                let to = unsafe { inner.part(start..start + words) };
                linear::lay_out(self.isa, down, activated, columns.len(), to);
            }
        }
    }

    /// `down` of the first round's rows, weighed and added up.
    fn second(&self, inner: &[u32], acc: &mut CpuTensor) {
        let Shape { hidden, inner: width, .. } = self.shape;
        let flops = 2 * self.routing.rows.len() * hidden * width;
        let panels = hidden.div_ceil(PANEL);
        let shares = self.shares(panels, 1, flops);
        let acc = Shared::new(acc.data_mut());
        self.pool.run(shares, flops, |task| {
            let panels = linear::share(panels, task, shares);
            SCRATCH.with_borrow_mut(|scratch| {
                for group in &self.active {
                    self.down(&group.expert.down, &group.members, inner, panels.clone(), &acc, &mut scratch.sums);
                }
            });
        });
    }

    /// Columns of one expert's rows in the second round.
    fn down(
        &self,
        w: &CpuLinear,
        members: &Range<usize>,
        inner: &[u32],
        panels: Range<usize>,
        acc: &Shared<'_, f32>,
        sums: &mut Vec<f32>,
    ) {
        let hidden = self.shape.hidden;
        let columns = panels.start * PANEL..hidden.min(panels.end * PANEL);
        let sums_row = panels.len() * PANEL;
        for members in blocks(members) {
            sums.resize(sums.len().max(members.len() * sums_row), 0.0);
            let x = &inner[members.start * self.row_words..members.end * self.row_words];
            let input = Input { x, row: self.row_words, take: None };
            let to = Shared::new(sums);
            let output = Output { to: &to, at: 0, row: sums_row, first_col: columns.start, accumulate: false };
            // SAFETY: `sums` is this task's, and nothing else of it is in use.
            unsafe { linear::block_of(self.isa, w, input, &output, 0..members.len(), panels.clone()) };
            for (member, sums) in members.zip(sums.chunks_exact(sums_row)) {
                let at = self.routing.rows[member] as usize * hidden;
                // SAFETY: the columns are this task's alone.
                let acc = unsafe { acc.part(at + columns.start..at + columns.end) };
                add_scaled(self.isa, acc, self.routing.weights[member], sums);
            }
        }
    }
}

/// The panels in which columns lie.
fn panels(columns: &Range<usize>) -> Range<usize> {
    columns.start / PANEL..columns.end.div_ceil(PANEL)
}

/// `members` in blocks of rows.
fn blocks(members: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = members.end;
    members.clone().step_by(BLOCK_ROWS).map(move |start| start..end.min(start + BLOCK_ROWS))
}

per_isa! {
    fn add_scaled(acc: &mut [f32], scale: f32, x: &[f32]) {
        acc.iter_mut().zip(x).for_each(|(acc, x)| *acc += scale * x);
    }
}

#[cfg(test)]
mod tests;
