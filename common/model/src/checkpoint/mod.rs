//! The files of a checkpoint: `config.json` and safetensors, single or sharded, on disk or in memory.
//!
//! Tensors, or ranges of their rows, are read when they are asked for, by positioned reads into memory of their own: a
//! model that packs each as it comes never holds the checkpoint and its packed weights at once. (A memory map would save
//! one copy, but needs unsafe code, and a file that shrinks under it kills the process instead of giving an error.)
//! What can go wrong is found before any weight is used: a shard that is missing, truncated or has bytes that no tensor
//! names, a tensor in the wrong file, fp8 numbers without scales, and (at the end of loading) a tensor, or rows of one,
//! that nothing asked for.

mod files;
mod fp8;
mod usage;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

use bytes::Bytes;
use hypic_state::{DType, HostTensor};
use safetensors::tensor::Dtype as StDtype;

use self::files::{Data, DataFile, INDEX, Place, SINGLE, shards_of};
pub(crate) use self::fp8::BlockScaled;
use self::usage::Usage;
use crate::{Config, ModelError, families};

const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
/// Bytes that are hashed at a time.
const PIECE: usize = 1 << 20;

/// A checkpoint, open for reading.
pub struct Checkpoint {
    config: Config,
    config_bytes: Vec<u8>,
    generation: Option<Config>,
    /// How fp8 tensors are scaled, if `config.json` says.
    scaled: Option<BlockScaled>,
    files: Vec<DataFile>,
    tensors: BTreeMap<String, Place>,
    usage: RefCell<Usage>,
}

impl Checkpoint {
    /// Open the checkpoint in `dir`.
    ///
    /// # Errors
    /// If a file is missing, unreadable, truncated or inconsistent, or the weights are quantised in a way that is not
    /// served.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        let read = |name: &str| {
            let path = dir.join(name);
            std::fs::read(&path).map_err(|reason| ModelError::Io { path, reason })
        };
        let config = read(CONFIG)?;
        let generation = dir.join(GENERATION_CONFIG).exists().then(|| read(GENERATION_CONFIG)).transpose()?;
        let mut checkpoint = Self::empty(config, generation.as_deref())?;
        let index = dir.join(INDEX).exists().then(|| read(INDEX)).transpose()?;
        let shards = index.as_deref().map(shards_of).transpose()?;
        if shards.as_ref().is_some_and(|map| !map.values().any(|shard| shard == SINGLE)) && dir.join(SINGLE).exists() {
            tracing::warn!("{} has {SINGLE} beside {INDEX}: the files that the index names are read", dir.display());
        }
        let names: Vec<String> = match &shards {
            Some(map) => map.values().cloned().collect::<BTreeSet<_>>().into_iter().collect(),
            None if dir.join(SINGLE).exists() => vec![SINGLE.to_string()],
            None => {
                let problem = format!("has neither {SINGLE} nor {INDEX}: only safetensors weights are read");
                return Err(ModelError::checkpoint(dir.display().to_string(), problem));
            }
        };
        for name in names {
            let path = dir.join(&name);
            if shards.is_some() && !path.is_file() {
                return Err(ModelError::checkpoint(name, format!("is missing: {INDEX} names this shard")));
            }
            let file = File::open(&path).map_err(|reason| ModelError::Io { path, reason })?;
            checkpoint.add(name, Data::File(file))?;
        }
        if let Some(map) = shards {
            checkpoint.check_index(&map)?;
        }
        checkpoint.rename();
        Ok(checkpoint)
    }

    /// A checkpoint whose files are in memory.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_memory(config: &[u8], generation: Option<&[u8]>, weights: Bytes) -> Result<Self, ModelError> {
        let mut checkpoint = Self::empty(config.to_vec(), generation)?;
        checkpoint.add(SINGLE.to_string(), Data::Memory(weights))?;
        checkpoint.rename();
        Ok(checkpoint)
    }

    fn empty(config_bytes: Vec<u8>, generation: Option<&[u8]>) -> Result<Self, ModelError> {
        let config = Config::parse_file(CONFIG, &config_bytes)?;
        let generation = generation.map(|g| Config::parse_file(GENERATION_CONFIG, g)).transpose()?;
        let scaled = BlockScaled::of(&config)?;
        let (files, tensors, usage) = (Vec::new(), BTreeMap::new(), RefCell::default());
        Ok(Checkpoint { config, config_bytes, generation, scaled, files, tensors, usage })
    }

    fn add(&mut self, name: String, data: Data) -> Result<(), ModelError> {
        let (file, tensors) = DataFile::open(name, data)?;
        let index = self.files.len();
        for (tensor, info) in tensors {
            let (dtype, shape, range) = (info.dtype, info.shape, info.data_offsets);
            let place = Place { file: index, dtype, shape, range, saved_as: None };
            if let Some(first) = self.tensors.insert(tensor.clone(), place) {
                let problem = format!("tensor {tensor} is also in {}", self.files[first.file].name);
                return Err(ModelError::checkpoint(file.name, problem));
            }
        }
        self.files.push(file);
        Ok(())
    }

    /// Give tensors that are saved under another name the one that the description has.
    fn rename(&mut self) {
        let names = families::also_named(&self.config);
        if !names.iter().any(|(theirs, _)| self.tensors.keys().any(|name| name.contains(theirs))) {
            return;
        }
        // What is odd or not served is told when the model is loaded.
        let quiet = tracing::subscriber::NoSubscriber::default();
        let described = tracing::subscriber::with_default(quiet, || families::describe(&self.config));
        let Ok(spec) = described else { return };
        let described = [false, true].map(|fused| spec.tensors(fused));
        let is_described = |name: &str| {
            let known = |name: &str| described.iter().any(|tensors| tensors.contains_key(name));
            known(name) || fp8::scaled_by(name).is_some_and(known)
        };
        for (theirs, ours) in names {
            let other = |name: &&String| name.contains(theirs) && !is_described(name);
            for name in self.tensors.keys().filter(other).cloned().collect::<Vec<_>>() {
                let new = name.replace(theirs, ours);
                if is_described(&new) && !self.tensors.contains_key(&new) {
                    let place = self.tensors.remove(&name).expect("just seen");
                    self.tensors.insert(new, Place { saved_as: Some(name), ..place });
                }
            }
        }
    }

    /// Rows of `columns` numbers that the tensor `name` has; `None` if it is not there or has no whole rows.
    pub(crate) fn rows_of(&self, name: &str, columns: usize) -> Option<usize> {
        let elements = self.tensors.get(name)?.elements();
        (columns > 0 && elements.is_multiple_of(columns)).then(|| elements / columns)
    }

    fn check_index(&self, map: &BTreeMap<String, String>) -> Result<(), ModelError> {
        for (tensor, shard) in map {
            match self.tensors.get(tensor) {
                Some(place) if &self.files[place.file].name == shard => {}
                _ => {
                    return Err(ModelError::checkpoint(
                        shard,
                        format!("lacks tensor {tensor}, which {INDEX} puts there"),
                    ));
                }
            }
        }
        match self.tensors.iter().find(|(name, _)| !map.contains_key(*name)) {
            Some((name, place)) => Err(self.broken(place, format!("has tensor {name}, which {INDEX} does not list"))),
            None => Ok(()),
        }
    }

    /// `config.json`.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// `generation_config.json`, if there is one.
    pub fn generation(&self) -> Option<&Config> {
        self.generation.as_ref()
    }

    /// Number of tensors.
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The file that holds the tensor `name`, if there is one.
    pub fn file_of(&self, name: &str) -> Option<&str> {
        self.tensors.get(name).map(|place| self.files[place.file].name.as_str())
    }

    /// The dtype of most of the weights, by bytes, if the engine has it; bf16 for fp8, which is stored, not computed.
    pub fn dtype(&self) -> Option<DType> {
        let mut bytes: Vec<(Option<DType>, usize)> = Vec::new();
        for place in self.tensors.values() {
            let dtype = if place.dtype == StDtype::F8_E4M3 { Some(DType::Bf16) } else { dtype_of(place.dtype) };
            let size = place.range.1 - place.range.0;
            match bytes.iter_mut().find(|(known, _)| *known == dtype) {
                Some((_, sum)) => *sum += size,
                None => bytes.push((dtype, size)),
            }
        }
        bytes.into_iter().max_by_key(|(_, size)| *size)?.0
    }

    /// The tensor `name`, which must have the shape `shape` (extents of 1 aside). What is stored as fp8 is scaled, and
    /// comes as f32.
    ///
    /// # Errors
    /// If it is missing, of another shape, of a dtype that the engine does not read, unreadable, or fp8 whose numbers or
    /// scales are wrong.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<HostTensor, ModelError> {
        let place = self.place(name, shape)?;
        if !without_ones(&place.shape).eq(without_ones(shape)) {
            return Err(self.misshapen(name, place, shape));
        }
        let (dtype, data) = self.elements(name, place, 0..place.elements())?;
        Ok(HostTensor::new(dtype, shape, data))
    }

    /// Rows `range` of the tensor `name` seen as a matrix `[rows, columns]`: what is stored with more axes is folded,
    /// the leading ones together (`[experts, n, k]` is `[experts * n, k]`), extents of 1 aside (`[c, 1, k]` is `[c, k]`).
    /// Reads no other rows. What is stored as fp8 is scaled, and comes as f32. `[range.len(), columns]`.
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor).
    ///
    /// # Panics
    /// If `range` is no range of `rows`.
    pub fn rows(&self, name: &str, shape: [usize; 2], range: Range<usize>) -> Result<HostTensor, ModelError> {
        let [rows, columns] = shape;
        assert!(range.start <= range.end && range.end <= rows, "rows {range:?} of {rows} of tensor {name}");
        let place = self.place(name, &shape)?;
        if !place.folds_to(shape) {
            return Err(self.misshapen(name, place, &shape));
        }
        let (dtype, data) = self.elements(name, place, range.start * columns..range.end * columns)?;
        Ok(HostTensor::new(dtype, [range.len(), columns], data))
    }

    /// Where the tensor `name` is, which is to have the shape `shape`.
    fn place(&self, name: &str, shape: &[usize]) -> Result<&Place, ModelError> {
        self.tensors.get(name).ok_or_else(|| {
            let file = self.files.first().map_or(SINGLE, |f| f.name.as_str());
            let file = if self.files.len() > 1 { INDEX } else { file };
            ModelError::checkpoint(file, format!("lacks tensor {name}, expected with shape {shape:?}"))
        })
    }

    fn broken(&self, place: &Place, problem: impl Into<String>) -> ModelError {
        ModelError::checkpoint(&self.files[place.file].name, problem)
    }

    /// That something is wrong with the tensor `name`, which is told by its name in the file.
    fn broken_tensor(&self, name: &str, place: &Place, problem: impl Display) -> ModelError {
        self.broken(place, format!("tensor {} {problem}", place.told(name)))
    }

    fn misshapen(&self, name: &str, place: &Place, shape: &[usize]) -> ModelError {
        let problem = format_args!("has shape {:?}, config.json makes it {shape:?}", place.shape);
        self.broken_tensor(name, place, problem)
    }

    /// The elements `range` of a tensor, in a dtype that the engine computes with.
    fn elements(&self, name: &str, place: &Place, range: Range<usize>) -> Result<(DType, Bytes), ModelError> {
        let read = match dtype_of(place.dtype) {
            Some(dtype) => (dtype, self.stored(name, place, range.clone())?),
            None if place.dtype == StDtype::F8_E4M3 => (DType::F32, self.scaled(name, place, range.clone())?),
            None => {
                let served = "f32, bf16 and f16 are read, and F8_E4M3 with scales of its blocks";
                return Err(self.broken_tensor(name, place, format_args!("is {:?}; {served}", place.dtype)));
            }
        };
        self.usage.borrow_mut().add(name, range);
        Ok(read)
    }

    /// The elements `range` of a tensor as they are stored, whole bytes each.
    fn stored(&self, name: &str, place: &Place, range: Range<usize>) -> Result<Bytes, ModelError> {
        let size = place.dtype.bitsize() / 8;
        let (from, len) = (place.range.0 + range.start * size, range.len() * size);
        let read = self.files[place.file].read(from, len);
        read.map_err(|e| self.broken(place, format!("tensor {}: {e}", place.told(name))))
    }

    /// The elements `range` of an fp8 tensor, times the scales of their blocks, as f32.
    fn scaled(&self, name: &str, place: &Place, range: Range<usize>) -> Result<Bytes, ModelError> {
        let broken = |problem: String| self.broken_tensor(name, place, problem);
        let Some(blocks) = self.scaled else {
            return Err(broken(
                "is F8_E4M3, but config.json has no quantization_config that tells the size of its blocks".to_string(),
            ));
        };
        let scales_name = fp8::scales_of(name);
        let Some(scales) = self.tensors.get(&scales_name) else {
            let per_tensor = format!("{name}_scale");
            return Err(broken(if self.has(&per_tensor) {
                format!(
                    "has one scale for all of it, {per_tensor}: fp8 is served with scales of blocks, {scales_name} only"
                )
            } else {
                format!("is F8_E4M3 without its scales: tensor {scales_name} is missing")
            }));
        };
        let grid = blocks.grid(&place.shape).ok_or_else(|| {
            broken(format!("is F8_E4M3 of shape {:?}; scales of blocks are for matrices", place.shape))
        })?;
        if scales.shape != grid.shape() {
            let problem = format!(
                "tensor {scales_name} has shape {:?}; the blocks of {name} {:?} make it {:?}",
                scales.shape,
                place.shape,
                grid.shape()
            );
            return Err(self.broken(scales, problem));
        }
        let Some(dtype @ (DType::F32 | DType::Bf16)) = dtype_of(scales.dtype) else {
            let problem = format!("tensor {scales_name} is {:?}; scales are read in f32 and bf16", scales.dtype);
            return Err(self.broken(scales, problem));
        };
        let needed = grid.scales_for(range.clone());
        let values =
            HostTensor::new(dtype, [needed.len()], self.stored(&scales_name, scales, needed.clone())?).to_f32();
        fp8::check_scales(&values).map_err(|problem| self.broken(scales, format!("tensor {scales_name} {problem}")))?;
        // One read of any rows needs its scales: which rows were read is told by the tensor itself.
        self.usage.borrow_mut().add(&scales_name, 0..scales.elements());
        let codes = self.stored(name, place, range.clone())?;
        grid.scale(&codes, range, &values).map_err(broken)
    }

    /// Every tensor must have been asked for, all rows of it, but for names that begin with one of `ignored`, in which
    /// `*` stands for a number. The prefixes that were met.
    ///
    /// # Errors
    /// If there is another, or one of which some rows were left.
    pub fn check_all_used(&self, ignored: &[String]) -> Result<Vec<String>, ModelError> {
        let usage = self.usage.borrow();
        let mut met = BTreeSet::new();
        let mut left = Vec::new();
        for (name, place) in &self.tensors {
            let Some(range) = usage.unused(name, place.elements()) else { continue };
            match ignored.iter().find(|prefix| begins_with(name, prefix)) {
                Some(prefix) => _ = met.insert(prefix.clone()),
                None => left.push((name, place, range)),
            }
        }
        let Some((name, place, range)) = left.first() else {
            return Ok(met.into_iter().collect());
        };
        let more = if left.len() > 1 { format!(" and {} more", left.len() - 1) } else { String::new() };
        let problem = if let Some(scaled) = fp8::scaled_by(name) {
            match self.tensors.get(scaled) {
                None => format!("tensor {name}{more} belongs to no part of the model: there is no {scaled} to scale"),
                Some(t) => format!("tensor {name}{more} belongs to no part of the model: {scaled} is {:?}", t.dtype),
            }
        } else if range.len() == place.elements() {
            format!("tensor {name}{more} belongs to no part of the model that config.json describes")
        } else {
            let width = place.width();
            let rows = range.start / width..range.end.div_ceil(width);
            format!(
                "rows {rows:?} of tensor {name} {:?}{more} belong to no part of the model that config.json describes",
                place.shape
            )
        };
        Err(self.broken(place, problem))
    }

    /// Fingerprint: blake3 over `config.json` and every tensor's name, dtype, shape and bytes, as they are stored. Reads
    /// everything once more (loading reads rows in the order of the model and leaves out what it ignores), in small
    /// pieces.
    ///
    /// # Errors
    /// If a tensor cannot be read.
    pub fn fingerprint(&self) -> Result<[u8; 32], ModelError> {
        let mut hash = blake3::Hasher::new();
        let field = |hash: &mut blake3::Hasher, bytes: &[u8]| {
            hash.update(&(bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        field(&mut hash, &self.config_bytes);
        for (name, place) in &self.tensors {
            field(&mut hash, place.told(name).as_bytes());
            field(&mut hash, format!("{:?} {:?}", place.dtype, place.shape).as_bytes());
            let (from, to) = place.range;
            hash.update(&((to - from) as u64).to_le_bytes());
            for at in (from..to).step_by(PIECE) {
                let piece = self.files[place.file].read(at, PIECE.min(to - at));
                hash.update(&piece.map_err(|e| self.broken(place, format!("tensor {name}: {e}")))?);
            }
        }
        Ok(hash.finalize().into())
    }
}

fn dtype_of(dtype: StDtype) -> Option<DType> {
    match dtype {
        StDtype::F32 => Some(DType::F32),
        StDtype::BF16 => Some(DType::Bf16),
        StDtype::F16 => Some(DType::F16),
        _ => None,
    }
}

fn without_ones(shape: &[usize]) -> impl DoubleEndedIterator<Item = usize> {
    shape.iter().copied().filter(|&d| d != 1)
}

/// Whether `name` begins with `prefix`, in which `*` stands for a number.
fn begins_with(name: &str, prefix: &str) -> bool {
    let Some((before, behind)) = prefix.split_once('*') else { return name.starts_with(prefix) };
    name.strip_prefix(before).is_some_and(|rest| {
        let other = rest.trim_start_matches(|c: char| c.is_ascii_digit());
        other.len() < rest.len() && begins_with(other, behind)
    })
}
