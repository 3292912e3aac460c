//! The algebra of transition operators in main memory: applying one to a state, and one after another.
//!
//! What can go wrong is that two operators, or an operator and a state, do not belong to the same
//! layer; every mismatch is a [`TransitionError`], found before anything is computed.

use crate::{DECAYED, DType, Dense, HostTensor, Transition};

/// Why an operator cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransitionError {
    /// The operator's own tensor does not have the shape of its kind.
    #[error("a {kind} transition needs a tensor of shape {expected}, got {got:?}")]
    Operator {
        /// Kind of the operator.
        kind: &'static str,
        /// What it needs, in words.
        expected: &'static str,
        /// Shape given.
        got: Vec<usize>,
    },
    /// Kept heads that are no ascending selection of the layer's heads.
    #[error("kept heads must ascend and be below {heads}: head {head} at index {index} does not")]
    Kept {
        /// Heads of the layer.
        heads: usize,
        /// Index into the list.
        index: usize,
        /// The offending head.
        head: u32,
    },
    /// The number of kept heads is not the number of blocks.
    #[error("{kept} kept heads but {blocks} blocks")]
    Blocks {
        /// Heads listed.
        kept: usize,
        /// Blocks in the tensor.
        blocks: usize,
    },
    /// Operators, or an operator and a state, with different numbers of heads.
    #[error("the operator has {expected} heads, what it acts on has {got}")]
    Heads {
        /// Heads of the operator.
        expected: usize,
        /// Heads of the other.
        got: usize,
    },
    /// Operators, or an operator and a state, with different key widths.
    #[error("the operator has d_k = {expected}, what it acts on has d_k = {got}")]
    KeyWidth {
        /// d_k of the operator.
        expected: usize,
        /// d_k of the other.
        got: usize,
    },
    /// A state that is not `[heads, d_k, d_v]`.
    #[error("a state has the shape [heads, d_k, d_v], got {got:?}")]
    State {
        /// Shape given.
        got: Vec<usize>,
    },
}

/// One head's operator in f64.
enum Block<'a> {
    Zero,
    Scalar(f64),
    Diagonal(&'a [f64]),
    /// Row-major `[d_k, d_k]`.
    Dense(&'a [f64]),
}

/// Numbers of an operator in f64, ready to be looked at head by head.
struct Wide<'a> {
    transition: &'a Transition<HostTensor>,
    values: Vec<f64>,
    d_k: Option<usize>,
}

impl<'a> Wide<'a> {
    fn new(transition: &'a Transition<HostTensor>, d_k: Option<usize>) -> Self {
        Wide { transition, values: transition.tensor().to_f64(), d_k }
    }

    fn head(&self, head: usize) -> Block<'_> {
        match self.transition {
            Transition::Scalar(_) => Block::Scalar(self.values[head]),
            Transition::Diagonal(_) => {
                let d_k = self.d_k.unwrap_or(0);
                Block::Diagonal(&self.values[head * d_k..][..d_k])
            }
            Transition::Dense(dense) => {
                let square = self.d_k.unwrap_or(0).pow(2);
                // Heads are u32 by construction of `kept`; one that does not fit is not kept.
                let at = u32::try_from(head).ok().and_then(|head| dense.kept.binary_search(&head).ok());
                at.map_or(Block::Zero, |at| Block::Dense(&self.values[at * square..][..square]))
            }
        }
    }
}

impl Transition<HostTensor> {
    /// The operator of no token at all, for a layer of `heads` heads: multiplies by one. It goes
    /// with operators of every kind.
    pub fn identity(heads: usize) -> Self {
        Transition::Scalar(HostTensor::from_f32([heads], &vec![1.0; heads]))
    }

    /// Number of heads of the layer; d_k where the operator's form has it.
    ///
    /// # Errors
    /// If the tensor's shape is not that of the operator's kind, or the kept heads are out of order.
    pub fn dims(&self) -> Result<(usize, Option<usize>), TransitionError> {
        let got = self.tensor().shape();
        let error = |kind, expected| TransitionError::Operator { kind, expected, got: got.to_vec() };
        match self {
            Transition::Scalar(_) => match got {
                &[heads] => Ok((heads, None)),
                _ => Err(error("scalar", "[heads]")),
            },
            Transition::Diagonal(_) => match got {
                &[heads, d_k] => Ok((heads, Some(d_k))),
                _ => Err(error("diagonal", "[heads, d_k]")),
            },
            Transition::Dense(Dense { heads, kept, .. }) => {
                let &[blocks, d_k, columns] = got else {
                    return Err(error("dense", "[kept, d_k, d_k]"));
                };
                if d_k != columns {
                    return Err(error("dense", "[kept, d_k, d_k]"));
                }
                if kept.len() != blocks {
                    return Err(TransitionError::Blocks { kept: kept.len(), blocks });
                }
                for (index, &head) in kept.iter().enumerate() {
                    let ascends = index == 0 || kept[index - 1] < head;
                    if !ascends || head as usize >= *heads {
                        return Err(TransitionError::Kept { heads: *heads, index, head });
                    }
                }
                Ok((*heads, Some(d_k)))
            }
        }
    }

    /// `T S`: the state that the stretch makes of `state` (`[heads, d_k, d_v]`), what it adds itself
    /// left out. Computed in f64; the result is f64 if the operator or the state is, else f32.
    ///
    /// # Errors
    /// If the state is not one of the operator's layer.
    pub fn apply(&self, state: &HostTensor) -> Result<HostTensor, TransitionError> {
        let (heads, d_k) = self.dims()?;
        let &[state_heads, rows, d_v] = state.shape() else {
            return Err(TransitionError::State { got: state.shape().to_vec() });
        };
        if heads != state_heads {
            return Err(TransitionError::Heads { expected: heads, got: state_heads });
        }
        if let Some(d_k) = d_k.filter(|d_k| *d_k != rows) {
            return Err(TransitionError::KeyWidth { expected: d_k, got: rows });
        }

        let operator = Wide::new(self, d_k);
        let before = state.to_f64();
        let mut after = vec![0.0; before.len()];
        let size = rows * d_v;
        for head in 0..heads {
            let from = &before[head * size..][..size];
            let to = &mut after[head * size..][..size];
            match operator.head(head) {
                Block::Zero => {}
                Block::Scalar(factor) => scale_into(to, from, |_, _| factor, d_v),
                Block::Diagonal(diagonal) => scale_into(to, from, |row, _| diagonal[row], d_v),
                Block::Dense(matrix) => multiply_into(to, matrix, from, rows, d_v),
            }
        }
        Ok(narrow(state.shape(), &after, [self.tensor().dtype(), state.dtype()]))
    }

    /// `later self`: the operator of this stretch followed by `later`. Of two different forms the
    /// result has the larger one; a dense result leaves out the heads that have decayed (see
    /// [`DECAYED`]). Computed in f64; the result is f64 if either operator is, else f32.
    ///
    /// # Errors
    /// If the two do not belong to the same layer.
    pub fn then(&self, later: &Transition<HostTensor>) -> Result<Transition<HostTensor>, TransitionError> {
        let (heads, d_first) = self.dims()?;
        let (later_heads, d_second) = later.dims()?;
        if heads != later_heads {
            return Err(TransitionError::Heads { expected: later_heads, got: heads });
        }
        if let (Some(got), Some(expected)) = (d_first, d_second)
            && got != expected
        {
            return Err(TransitionError::KeyWidth { expected, got });
        }
        let d_k = d_first.or(d_second);
        let (first, second) = (Wide::new(self, d_first), Wide::new(later, d_second));
        let dtypes = [self.tensor().dtype(), later.tensor().dtype()];

        let Some(d_k) = d_k else {
            let product: Vec<f64> = first.values.iter().zip(&second.values).map(|(a, b)| a * b).collect();
            return Ok(Transition::Scalar(narrow(&[heads], &product, dtypes)));
        };

        let dense = matches!(self, Transition::Dense(_)) || matches!(later, Transition::Dense(_));
        if !dense {
            let mut product = Vec::with_capacity(heads * d_k);
            for head in 0..heads {
                let (a, b) = (first.head(head), second.head(head));
                product.extend((0..d_k).map(|row| b.diagonal(row) * a.diagonal(row)));
            }
            return Ok(Transition::Diagonal(narrow(&[heads, d_k], &product, dtypes)));
        }

        let floor = DECAYED * (d_k as f64).sqrt();
        let mut kept = Vec::new();
        let mut blocks = Vec::new();
        let mut product = vec![0.0; d_k * d_k];
        for head in 0..heads {
            if !second.head(head).product_into(&first.head(head), d_k, &mut product) {
                continue;
            }
            let norm = product.iter().map(|x| x * x).sum::<f64>().sqrt();
            // Written so that NaN stays visible in the result.
            if norm <= floor {
                continue;
            }
            kept.push(head as u32);
            blocks.extend_from_slice(&product);
        }
        let blocks = narrow(&[kept.len(), d_k, d_k], &blocks, dtypes);
        Ok(Transition::Dense(Dense { heads, kept, blocks }))
    }
}

impl Block<'_> {
    /// Element `row` of a diagonal form.
    fn diagonal(&self, row: usize) -> f64 {
        match self {
            Block::Scalar(factor) => *factor,
            Block::Diagonal(diagonal) => diagonal[row],
            Block::Zero | Block::Dense(_) => unreachable!("only scalar and diagonal forms have a diagonal here"),
        }
    }

    /// Writes `self right` to `out` (`[d_k, d_k]`), one of the two being dense; false if it is zero.
    fn product_into(&self, right: &Block<'_>, d_k: usize, out: &mut [f64]) -> bool {
        match (self, right) {
            (Block::Zero, _) | (_, Block::Zero) => return false,
            (Block::Dense(left), Block::Dense(right)) => multiply_into(out, left, right, d_k, d_k),
            // A diagonal on the left scales rows, on the right columns.
            (left, Block::Dense(right)) => scale_into(out, right, |row, _| left.diagonal(row), d_k),
            (Block::Dense(left), right) => scale_into(out, left, |_, column| right.diagonal(column), d_k),
            _ => unreachable!("a product of forms without a dense one is not dense"),
        }
        true
    }
}

/// `to[row, column] = factor(row, column) * from[row, column]`.
fn scale_into(to: &mut [f64], from: &[f64], factor: impl Fn(usize, usize) -> f64, columns: usize) {
    for (i, (to, from)) in to.iter_mut().zip(from).enumerate() {
        *to = factor(i / columns, i % columns) * from;
    }
}

/// `out = left right` with left `[rows, rows]` and right `[rows, columns]`.
fn multiply_into(out: &mut [f64], left: &[f64], right: &[f64], rows: usize, columns: usize) {
    out.fill(0.0);
    for row in 0..rows {
        let out_row = &mut out[row * columns..][..columns];
        for inner in 0..rows {
            let factor = left[row * rows + inner];
            let right_row = &right[inner * columns..][..columns];
            for (out, right) in out_row.iter_mut().zip(right_row) {
                *out += factor * right;
            }
        }
    }
}

/// `values` as f64 if any of `dtypes` is, else as f32.
fn narrow(shape: &[usize], values: &[f64], dtypes: [DType; 2]) -> HostTensor {
    if dtypes.contains(&DType::F64) {
        return HostTensor::from_f64(shape, values);
    }
    let rounded: Vec<f32> = values.iter().map(|v| *v as f32).collect();
    HostTensor::from_f32(shape, &rounded)
}
