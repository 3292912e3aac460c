//! Block-scaled fp8, as published checkpoints have it: a weight is its F8_E4M3 number times the scale of its block.
//!
//! A tensor `NAME [.., n, k]` has scales `NAME_scale_inv [.., ceil(n / rows), ceil(k / columns)]`, blocks at the edges
//! being smaller. What can go wrong: a method that is not this one (refused by the name of its key), a scale or a number
//! that is none.

use std::ops::Range;

use bytes::Bytes;
use serde_json::Value;

use crate::{Config, ModelError};

/// Largest finite F8_E4M3 number.
const LARGEST: f32 = 448.0;
const SCALES: &str = "_scale_inv";

/// Every F8_E4M3 code's number (Micikevicius et al., FP8 Formats for Deep Learning, 2022): a sign, four bits of exponent
/// with bias 7, three of mantissa, subnormal numbers, no infinities; the code of all ones but the sign is no number.
const DECODED: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = decode(code as u8);
        code += 1;
    }
    table
};

const fn decode(code: u8) -> f32 {
    let (exponent, mantissa) = ((code >> 3 & 15) as u32, (code & 7) as u32);
    let size = match (exponent, mantissa) {
        (15, 7) => return f32::NAN,
        (0, _) => mantissa as f32 / 512.0,
        _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
    };
    if code < 128 { size } else { -size }
}

/// The name of the scales of tensor `name`.
pub(super) fn scales_of(name: &str) -> String {
    format!("{name}{SCALES}")
}

/// The tensor that a tensor of this name scales, if it is one of scales.
pub(super) fn scaled_by(name: &str) -> Option<&str> {
    name.strip_suffix(SCALES)
}

/// Extents of the blocks that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockScaled {
    rows: usize,
    columns: usize,
}

impl BlockScaled {
    /// From the `quantization_config` of a `config.json`, of either level; `None`: there is none.
    ///
    /// # Errors
    /// If it asks for anything else than block-scaled fp8 weights.
    pub(crate) fn of(config: &Config) -> Result<Option<Self>, ModelError> {
        const KEY: &str = "quantization_config";
        let mut found = None;
        for level in [config.text()?, config.clone()] {
            let Some(quantization) = level.object(KEY)? else { continue };
            let blocks = Self::parse(&quantization)?;
            if found.is_some_and(|first| first != blocks) {
                return Err(level.wrong(KEY, "differs from that of text_config"));
            }
            found = Some(blocks);
        }
        Ok(found)
    }

    fn parse(config: &Config) -> Result<Self, ModelError> {
        const METHOD: &str = "quant_method";
        const BLOCK: &str = "weight_block_size";
        const FORMAT: &str = "fmt";
        const SERVED: &str = "weights in f32, bf16, f16 and block-scaled fp8 are served";
        if config.opt_str(METHOD)?.as_deref() != Some("fp8") {
            return Err(config.unsupported(METHOD, SERVED));
        }
        if config.opt_str(FORMAT)?.is_some_and(|format| !["e4m3", "float8_e4m3fn"].contains(&format.as_str())) {
            return Err(config.unsupported(FORMAT, "only fp8 in e4m3 is served"));
        }
        config.only("activation_scheme", &Value::from("dynamic"))?;
        // Which tensors are fp8 is seen from the tensors themselves.
        for list in ["modules_to_not_convert", "ignored_layers"] {
            config.opt_strings(list)?;
        }
        config.opt_bool("dequantize")?;
        let known =
            [METHOD, FORMAT, BLOCK, "activation_scheme", "modules_to_not_convert", "ignored_layers", "dequantize"];
        if let Some(other) = config.keys().find(|key| !known.contains(key)) {
            return Err(config.unsupported(other, "block-scaled fp8 with this key is not served"));
        }
        match config.opt_sizes(BLOCK)?.as_deref() {
            Some(&[rows, columns]) => Ok(BlockScaled { rows, columns }),
            Some(_) => Err(config.wrong(BLOCK, "must be two extents, [rows, columns]")),
            None => Err(config.unsupported(BLOCK, "fp8 is served with scales of blocks, not with one per tensor")),
        }
    }

    /// The blocks of a tensor; `None` if it is no matrix.
    pub(super) fn grid(self, shape: &[usize]) -> Option<Grid<'_>> {
        match shape {
            [leading @ .., rows, columns] => Some(Grid { leading, rows: *rows, columns: *columns, block: self }),
            _ => None,
        }
    }
}

/// The blocks of one tensor, a matrix or several of the same size.
pub(super) struct Grid<'a> {
    leading: &'a [usize],
    rows: usize,
    columns: usize,
    block: BlockScaled,
}

impl Grid<'_> {
    fn across(&self) -> usize {
        self.columns.div_ceil(self.block.columns)
    }

    fn down(&self) -> usize {
        self.rows.div_ceil(self.block.rows)
    }

    /// Shape of the scales.
    pub fn shape(&self) -> Vec<usize> {
        [self.leading, &[self.down(), self.across()]].concat()
    }

    /// The row of scales that serves `row`, both counted through all matrices.
    fn row_of_scales(&self, row: usize) -> usize {
        row / self.rows * self.down() + row % self.rows / self.block.rows
    }

    /// The rows in which the elements `range` are.
    fn rows_of(&self, range: &Range<usize>) -> Range<usize> {
        if range.is_empty() { 0..0 } else { range.start / self.columns..(range.end - 1) / self.columns + 1 }
    }

    /// The scales that the elements `range` need, as elements of the scales.
    pub fn scales_for(&self, range: Range<usize>) -> Range<usize> {
        let rows = self.rows_of(&range);
        if rows.is_empty() {
            return 0..0;
        }
        self.row_of_scales(rows.start) * self.across()..(self.row_of_scales(rows.end - 1) + 1) * self.across()
    }

    /// The elements `range`, which have these codes, times `scales`, which are [`scales_for`](Self::scales_for) them.
    /// Bytes of f32.
    ///
    /// # Errors
    /// If a code stands for no number; tells where.
    pub fn scale(&self, codes: &[u8], range: Range<usize>, scales: &[f32]) -> Result<Bytes, String> {
        debug_assert_eq!(codes.len(), range.len());
        let mut out = vec![0; codes.len() * size_of::<f32>()];
        let (mut codes, mut free) = (codes, out.as_chunks_mut().0);
        let rows = self.rows_of(&range);
        let first_scales = if rows.is_empty() { 0 } else { self.row_of_scales(rows.start) };
        for row in rows {
            let row_scales = &scales[(self.row_of_scales(row) - first_scales) * self.across()..];
            let mut column = range.start.max(row * self.columns) - row * self.columns;
            let end = range.end.min((row + 1) * self.columns) - row * self.columns;
            while column < end {
                let block = column / self.block.columns;
                let width = end.min((block + 1) * self.block.columns) - column;
                let (block_codes, block_out);
                (block_codes, codes) = codes.split_at(width);
                (block_out, free) = free.split_at_mut(width);
                if let Some(at) = block_codes.iter().position(|code| code & 0x7f == 0x7f) {
                    let (code, column) = (block_codes[at], column + at);
                    return Err(format!("holds {code:#04x}, which is no number, in row {row}, column {column}"));
                }
                for (code, number) in block_codes.iter().zip(block_out) {
                    *number = (DECODED[*code as usize] * row_scales[block]).to_le_bytes();
                }
                column += width;
            }
        }
        Ok(out.into())
    }
}

/// Scales must be numbers of 0 or more with which every fp8 number stays finite.
pub(super) fn check_scales(scales: &[f32]) -> Result<(), String> {
    // NaN is in no range.
    match scales.iter().find(|scale| !(0.0..=f32::MAX / LARGEST).contains(*scale)) {
        Some(bad) => Err(format!("holds {bad}, which is no scale")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every code by the definition, in powers of two.
    #[test]
    fn every_code_is_what_the_format_defines() {
        for code in 0..=255u8 {
            let (sign, exponent, mantissa) = (code >> 7, i32::from(code >> 3 & 15), f64::from(code & 7));
            let size = match exponent {
                15 if mantissa == 7.0 => f64::NAN,
                0 => mantissa / 8.0 * 2f64.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
            };
            let want = (-1f64).powi(i32::from(sign)) * size;
            let got = f64::from(DECODED[code as usize]);
            assert!(got.is_nan() == want.is_nan(), "{code:#04x}");
            assert!(want.is_nan() || got.to_bits() == want.to_bits(), "{code:#04x}: {got} instead of {want}");
        }
        // Landmarks of the paper's table.
        for (code, value) in [(0x7e, 448.0), (0x38, 1.0), (0x08, 2f32.powi(-6)), (0x01, 2f32.powi(-9)), (0xfe, -448.0)]
        {
            assert_eq!(DECODED[code], value);
        }
    }
}
