//! Reference tensors from safetensors files.

use std::collections::BTreeMap;

use safetensors::{Dtype, SafeTensors};

/// A tensor of reference numbers.
pub struct Numbers {
    /// Extent of each axis.
    pub shape: Vec<usize>,
    /// The numbers, row-major.
    pub values: Vec<f64>,
}

impl Numbers {
    /// The largest absolute value.
    pub fn largest(&self) -> f64 {
        self.values.iter().fold(0.0, |m, v| f64::max(m, v.abs()))
    }

    /// The numbers as token ids.
    pub fn ids(&self) -> Vec<u32> {
        self.values.iter().map(|&v| v as u32).collect()
    }
}

/// All tensors of a file below this crate's folder.
pub struct Golden(BTreeMap<String, Numbers>);

impl Golden {
    /// Read it.
    pub fn open(relative: &str) -> Self {
        let path = crate::path(relative);
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = SafeTensors::deserialize(&bytes).expect("reference data is a safetensors file");
        let numbers = |data: &[u8], dtype: Dtype| -> Vec<f64> {
            match dtype {
                Dtype::F32 => data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect(),
                Dtype::F64 => data.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
                Dtype::I64 => data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect(),
                other => panic!("reference data of dtype {other:?}"),
            }
        };
        let tensors = file
            .tensors()
            .into_iter()
            .map(|(name, t)| (name, Numbers { shape: t.shape().to_vec(), values: numbers(t.data(), t.dtype()) }));
        Golden(tensors.collect())
    }

    /// The tensor `name`.
    pub fn get(&self, name: &str) -> &Numbers {
        self.find(name).unwrap_or_else(|| panic!("no tensor {name} in the reference data"))
    }

    /// The tensor `name`, if there is one.
    pub fn find(&self, name: &str) -> Option<&Numbers> {
        self.0.get(name)
    }
}

/// Fails unless every number is within `tolerance` (absolute) of the reference.
pub fn assert_close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}: number of values");
    let worst = got.iter().zip(want).enumerate().map(|(i, (g, w))| (i, (g - w).abs()));
    // NaN must not pass: it is larger than anything.
    let (at, off) = worst.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, 0.0));
    assert!(
        off <= tolerance,
        "{what}: value {at} is {} instead of {}, off by {off:e} > {tolerance:e}",
        got[at],
        want[at]
    );
}

/// The even numbers of each stretch of `width`, then the odd ones: pairs that are rotated together stand beside each
/// other in a store, and half a stretch apart in the reference data.
pub fn deinterleave(values: &[f64], width: usize) -> Vec<f64> {
    let halves = |stretch: &[f64]| [0, 1].map(|odd| stretch.iter().skip(odd).step_by(2).copied().collect::<Vec<_>>());
    values.chunks(width).flat_map(|stretch| halves(stretch).concat()).collect()
}

/// `[outer, inner]` of each `[inner, outer]` stretch of groups of `width` numbers.
pub fn transpose(values: &[f64], inner: usize, outer: usize, width: usize) -> Vec<f64> {
    let at = |o: usize, i: usize| (i * outer + o) * width;
    let stretch = |stretch: &[f64]| -> Vec<f64> {
        let groups = (0..outer).flat_map(|o| (0..inner).map(move |i| at(o, i)));
        groups.flat_map(|from| &stretch[from..from + width]).copied().collect()
    };
    values.chunks(inner * outer * width).flat_map(stretch).collect()
}

/// Columns `columns` of a matrix of `width` columns.
pub fn columns(values: &[f64], width: usize, columns: std::ops::Range<usize>) -> Vec<f64> {
    values.chunks(width).flat_map(|row| &row[columns.clone()]).copied().collect()
}

/// Index of the largest number.
pub fn argmax(values: &[f64]) -> u32 {
    let best = values.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    best.expect("logits are not empty").0 as u32
}
