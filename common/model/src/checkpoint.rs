//! The files of a checkpoint: `config.json` and safetensors, single or sharded, on disk or in memory.
//!
//! Tensors are read one at a time, when asked for. What can go wrong is found before any weight is
//! used: a shard that is missing, truncated or has bytes that no tensor names, a tensor in the wrong
//! file, and (at the end of loading) a tensor that nothing asked for.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bytes::Bytes;
use hypic_state::{DType, HostTensor};
use safetensors::tensor::{Dtype as StDtype, Metadata};

use crate::{Config, ModelError};

const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// A safetensors header may be this long (the format's own limit).
const MAX_HEADER: u64 = 100_000_000;

/// A checkpoint, open for reading.
pub struct Checkpoint {
    config: Config,
    config_bytes: Vec<u8>,
    generation: Option<Config>,
    files: Vec<DataFile>,
    tensors: BTreeMap<String, Place>,
    used: RefCell<BTreeSet<String>>,
}

struct DataFile {
    name: String,
    data: Data,
    /// Where tensor data begins.
    base: u64,
}

enum Data {
    File(File),
    Memory(Bytes),
}

#[derive(Clone, Debug)]
struct Place {
    file: usize,
    dtype: StDtype,
    shape: Vec<usize>,
    range: (usize, usize),
}

impl Checkpoint {
    /// Open the checkpoint in `dir`.
    ///
    /// # Errors
    /// If a file is missing, unreadable, truncated or inconsistent.
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
        Ok(checkpoint)
    }

    /// A checkpoint whose files are in memory.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_memory(config: &[u8], generation: Option<&[u8]>, weights: Bytes) -> Result<Self, ModelError> {
        let mut checkpoint = Self::empty(config.to_vec(), generation)?;
        checkpoint.add(SINGLE.to_string(), Data::Memory(weights))?;
        Ok(checkpoint)
    }

    fn empty(config_bytes: Vec<u8>, generation: Option<&[u8]>) -> Result<Self, ModelError> {
        let config = Config::parse_file(CONFIG, &config_bytes)?;
        let generation = generation.map(|g| Config::parse_file(GENERATION_CONFIG, g)).transpose()?;
        let (files, tensors, used) = (Vec::new(), BTreeMap::new(), RefCell::default());
        Ok(Checkpoint { config, config_bytes, generation, files, tensors, used })
    }

    fn add(&mut self, name: String, data: Data) -> Result<(), ModelError> {
        let broken = |problem: String| ModelError::checkpoint(&name, problem);
        let length = match &data {
            Data::File(f) => f.metadata().map_err(|e| broken(e.to_string()))?.len(),
            Data::Memory(b) => b.len() as u64,
        };
        if length < 8 {
            return Err(broken(format!("is truncated: {length} bytes, not even a safetensors header")));
        }
        let header = u64::from_le_bytes(
            read(&data, 0, 8).map_err(|e| broken(e.to_string()))?.as_ref().try_into().expect("8 bytes"),
        );
        if header > MAX_HEADER || header > length - 8 {
            return Err(broken(format!(
                "is no safetensors file, or truncated: a header of {header} bytes in a file of {length}"
            )));
        }
        let header_len = usize::try_from(header).expect("below the limit");
        let head = read(&data, 8, header_len).map_err(|e| broken(e.to_string()))?;
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
        let file = self.files.len();
        for (tensor, info) in named {
            let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |n, &d| n.checked_mul(d));
            let (from, to) = info.data_offsets;
            if to < from || bits != (to - from).checked_mul(8) {
                return Err(broken(format!(
                    "tensor {tensor}: {:?} {:?} does not fit its {from}..{to}",
                    info.dtype, info.shape
                )));
            }
            let place = Place { file, dtype: info.dtype, shape: info.shape.clone(), range: (from, to) };
            if let Some(first) = self.tensors.insert(tensor.clone(), place) {
                return Err(broken(format!("tensor {tensor} is also in {}", self.files[first.file].name)));
            }
        }
        self.files.push(DataFile { name, data, base });
        Ok(())
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
            Some((name, place)) => {
                let file = &self.files[place.file].name;
                Err(ModelError::checkpoint(file, format!("has tensor {name}, which {INDEX} does not list")))
            }
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

    /// The dtype of most of the weights, by bytes, if the engine has it.
    pub fn dtype(&self) -> Option<DType> {
        let mut bytes: BTreeMap<String, (usize, StDtype)> = BTreeMap::new();
        for place in self.tensors.values() {
            bytes.entry(format!("{:?}", place.dtype)).or_insert((0, place.dtype)).0 += place.range.1 - place.range.0;
        }
        let (_, most) = bytes.into_values().max_by_key(|(n, _)| *n)?;
        dtype_of(most)
    }

    /// The tensor `name`, which must have the shape `shape` (extents of 1 aside).
    ///
    /// # Errors
    /// If it is missing, of another shape, of a dtype that the engine does not read, or unreadable.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<HostTensor, ModelError> {
        let Some(place) = self.tensors.get(name) else {
            let file = self.files.first().map_or(SINGLE, |f| f.name.as_str());
            let file = if self.files.len() > 1 { INDEX } else { file };
            return Err(ModelError::checkpoint(file, format!("lacks tensor {name}, expected with shape {shape:?}")));
        };
        let file = &self.files[place.file];
        let real = |s: &[usize]| s.iter().copied().filter(|&d| d != 1).collect::<Vec<_>>();
        if real(&place.shape) != real(shape) {
            let problem = format!("tensor {name} has shape {:?}, config.json makes it {shape:?}", place.shape);
            return Err(ModelError::checkpoint(&file.name, problem));
        }
        let dtype = dtype_of(place.dtype).ok_or_else(|| {
            let problem = format!("tensor {name} is {:?}; f32, bf16 and f16 are read", place.dtype);
            ModelError::checkpoint(&file.name, problem)
        })?;
        let data = self.bytes(name, place)?;
        self.used.borrow_mut().insert(name.to_string());
        Ok(HostTensor::new(dtype, shape, data))
    }

    fn bytes(&self, name: &str, place: &Place) -> Result<Bytes, ModelError> {
        let file = &self.files[place.file];
        let (from, to) = place.range;
        read(&file.data, file.base + from as u64, to - from)
            .map_err(|e| ModelError::checkpoint(&file.name, format!("tensor {name}: {e}")))
    }

    /// Every tensor that was asked for so far must be all there is, but for names that begin with one
    /// of `ignored`. The prefixes that were met.
    ///
    /// # Errors
    /// If there is another.
    pub fn check_all_used(&self, ignored: &[String]) -> Result<Vec<String>, ModelError> {
        let used = self.used.borrow();
        let mut met = BTreeSet::new();
        let mut unknown = Vec::new();
        for name in self.tensors.keys().filter(|n| !used.contains(*n)) {
            match ignored.iter().find(|p| name.starts_with(p.as_str())) {
                Some(prefix) => _ = met.insert(prefix.clone()),
                None => unknown.push(name.as_str()),
            }
        }
        let Some(first) = unknown.first() else {
            return Ok(met.into_iter().collect());
        };
        let file = &self.files[self.tensors[*first].file].name;
        let more = if unknown.len() > 1 { format!(" and {} more", unknown.len() - 1) } else { String::new() };
        let problem = format!("tensor {first}{more} belongs to no part of the model that config.json describes");
        Err(ModelError::checkpoint(file, problem))
    }

    /// Fingerprint: blake3 over `config.json` and every tensor's name, dtype, shape and bytes.
    ///
    /// # Errors
    /// If a tensor cannot be read.
    pub fn fingerprint(&self) -> Result<[u8; 32], ModelError> {
        let mut hash = blake3::Hasher::new();
        let mut field = |bytes: &[u8]| {
            hash.update(&(bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        field(&self.config_bytes);
        for (name, place) in &self.tensors {
            field(name.as_bytes());
            field(format!("{:?} {:?}", place.dtype, place.shape).as_bytes());
            field(&self.bytes(name, place)?);
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

fn read(data: &Data, at: u64, len: usize) -> std::io::Result<Bytes> {
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

fn shards_of(index: &[u8]) -> Result<BTreeMap<String, String>, ModelError> {
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
