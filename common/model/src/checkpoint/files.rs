//! One safetensors file, its header checked against its length, and the index of a sharded checkpoint.
//!
//! A header that lies (about its own length, about tensors that overlap, leave holes or end behind the file) is refused
//! here, so that later reads stay inside the file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use bytes::Bytes;
use safetensors::tensor::{Dtype as StDtype, Metadata, TensorInfo};

use super::without_ones;
use crate::ModelError;

pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// A safetensors header may be this long (the format's own limit).
const MAX_HEADER: u64 = 100_000_000;

/// A file of tensors.
pub(super) struct DataFile {
    pub name: String,
    data: Data,
    /// Where tensor data begins.
    base: u64,
}

/// Where a file's bytes are.
pub(super) enum Data {
    File(File),
    Memory(Bytes),
}

/// Where a tensor is.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// Index of the file.
    pub file: usize,
    pub dtype: StDtype,
    pub shape: Vec<usize>,
    /// First byte and the byte behind the last, counted from where the file's tensor data begins.
    pub range: (usize, usize),
    /// Its name in the file, if that is another one.
    pub saved_as: Option<String>,
}

impl Place {
    /// What the tensor `name` is called in its file.
    pub fn told<'a>(&'a self, name: &'a str) -> &'a str {
        self.saved_as.as_deref().unwrap_or(name)
    }

    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Width of a row, its axes folded as [`folds_to`](Self::folds_to) does.
    pub fn width(&self) -> usize {
        if self.shape.len() < 2 { 1 } else { without_ones(&self.shape).next_back().unwrap_or(1).max(1) }
    }

    /// Whether the tensor can be seen as a matrix `[rows, columns]`: its last axis is the columns, the others together
    /// are the rows; extents of 1 do not count.
    pub fn folds_to(&self, [rows, columns]: [usize; 2]) -> bool {
        let last = match columns {
            1 if without_ones(&self.shape).count() > 1 => self.shape.last().copied(),
            1 => Some(1),
            _ => without_ones(&self.shape).next_back(),
        };
        last == Some(columns) && rows.checked_mul(columns) == Some(self.elements())
    }
}

impl DataFile {
    /// Read and check the header.
    pub fn open(name: String, data: Data) -> Result<(Self, Vec<(String, TensorInfo)>), ModelError> {
        let broken = |problem: String| ModelError::checkpoint(&name, problem);
        let unreadable = |e: io::Error| broken(e.to_string());
        let length = match &data {
            Data::File(f) => f.metadata().map_err(unreadable)?.len(),
            Data::Memory(b) => b.len() as u64,
        };
        if length < 8 {
            return Err(broken(format!("is truncated: {length} bytes, not even a safetensors header")));
        }
        let header_bytes = read(&data, 0, 8).map_err(unreadable)?;
        let header = u64::from_le_bytes(header_bytes.as_ref().try_into().expect("8 bytes"));
        if header > MAX_HEADER || header > length - 8 {
            return Err(broken(format!(
                "is no safetensors file, or truncated: a header of {header} bytes in a file of {length}"
            )));
        }
        let header_len = usize::try_from(header).expect("below the limit");
        let head = read(&data, 8, header_len).map_err(unreadable)?;
        let metadata: Metadata =
            serde_json::from_slice(&head).map_err(|e| broken(format!("has a malformed safetensors header: {e}")))?;
        let base = 8 + header;
        let named = metadata.tensors();
        let end = named.values().map(|t| t.data_offsets.1 as u64).max().unwrap_or(0);
        let need = base.saturating_add(end);
        if need != length {
            let problem = if need > length { "is truncated" } else { "has bytes that belong to no tensor" };
            return Err(broken(format!("{problem}: its header describes {need} bytes, the file has {length}")));
        }
        let mut tensors = Vec::with_capacity(named.len());
        for (tensor, info) in named {
            let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |n, &d| n.checked_mul(d));
            let (from, to) = info.data_offsets;
            if to < from || bits != (to - from).checked_mul(8) {
                return Err(broken(format!(
                    "tensor {tensor}: {:?} {:?} does not fit its {from}..{to}",
                    info.dtype, info.shape
                )));
            }
            tensors.push((tensor, info.clone()));
        }
        Ok((DataFile { name, data, base }, tensors))
    }

    /// `len` bytes from `at` on, counted from where tensor data begins.
    pub fn read(&self, at: usize, len: usize) -> io::Result<Bytes> {
        read(&self.data, self.base + at as u64, len)
    }
}

fn read(data: &Data, at: u64, len: usize) -> io::Result<Bytes> {
    match data {
        Data::File(file) => {
            let mut buffer = vec![0; len];
            file.read_exact_at(&mut buffer, at)?;
            Ok(buffer.into())
        }
        Data::Memory(bytes) => {
            let at = usize::try_from(at).expect("memory is addressed by usize");
            Ok(bytes.slice(at..at + len))
        }
    }
}

/// The shard of each tensor.
pub(super) fn shards_of(index: &[u8]) -> Result<BTreeMap<String, String>, ModelError> {
    let broken = |problem: String| ModelError::checkpoint(INDEX, problem);
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(index).map_err(|e| broken(e.to_string()))?;
    for shard in index.weight_map.values() {
        if shard.is_empty() || shard.starts_with('.') || shard.contains(['/', '\\', '\0']) {
            return Err(broken(format!("names the shard {shard:?}, which is no plain file name")));
        }
    }
    Ok(index.weight_map)
}
