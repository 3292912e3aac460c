//! Reading some rows of a tensor: the right ones, no others, and what was left is told.

use std::fs::File;
use std::io::Write;

use bytes::Bytes;
use hypic_model::Checkpoint;
use hypic_state::DType;
use safetensors::tensor::Dtype;
use serde_json::json;

use crate::support::{Files, Stored};

fn values(shape: &[usize]) -> Vec<f32> {
    (0..shape.iter().product::<usize>()).map(|i| i as f32).collect()
}

/// A checkpoint of tensors of these shapes, on disk or in memory, whose elements are 0, 1, 2, ...
fn open(tensors: &[(&str, &[usize])]) -> [Checkpoint; 2] {
    let mut files = Files { config: json!({}), tensors: Default::default() };
    for (name, shape) in tensors {
        files.tensors.insert(name.to_string(), Stored::f32(shape, &values(shape)));
    }
    let memory = Checkpoint::from_memory(b"{}", None, Bytes::from(files.bytes())).unwrap();
    // Open files stay readable when their directory is removed.
    [Checkpoint::open(files.write().path()).unwrap(), memory]
}

#[test]
fn rows_of_folded_tensors() {
    let tensors: [(&str, &[usize]); 6] = [
        ("matrix", &[6, 4]),
        ("experts", &[3, 2, 4]),
        ("taps", &[6, 1, 4]),
        ("nested", &[1, 3, 1, 2, 4]),
        ("column", &[6, 1]),
        ("vector", &[6]),
    ];
    for checkpoint in open(&tensors) {
        for name in ["matrix", "experts", "taps", "nested"] {
            for (from, to) in [(0, 6), (0, 1), (5, 6), (2, 5), (3, 3), (0, 0), (6, 6)] {
                let rows = checkpoint.rows(name, [6, 4], from..to).unwrap();
                assert_eq!((rows.dtype(), rows.shape()), (DType::F32, [to - from, 4].as_slice()));
                assert_eq!(rows.to_f32(), values(&[6, 4])[from * 4..to * 4], "{name} {from}..{to}");
            }
        }
        for name in ["column", "vector"] {
            assert_eq!(checkpoint.rows(name, [6, 1], 2..4).unwrap().to_f32(), [2.0, 3.0], "{name}");
            assert_eq!(checkpoint.rows(name, [1, 6], 0..1).unwrap().to_f32(), values(&[6]), "{name}");
        }
    }
}

#[test]
fn other_shapes_are_refused() {
    for checkpoint in open(&[("matrix", &[6, 4]), ("experts", &[3, 2, 4]), ("vector", &[6])]) {
        for (name, shape) in [
            ("matrix", [4, 6]),
            ("matrix", [12, 2]),
            ("matrix", [3, 8]),
            ("matrix", [24, 1]),
            ("matrix", [1, 24]),
            ("matrix", [5, 4]),
            ("experts", [3, 8]),
            ("experts", [12, 2]),
            ("experts", [24, 1]),
            ("experts", [7, 4]),
            ("experts", [usize::MAX, 4]),
            ("vector", [3, 2]),
            ("vector", [2, 3]),
        ] {
            let error = checkpoint.rows(name, shape, 0..1).unwrap_err().to_string();
            for word in ["model.safetensors", name, "has shape", &format!("{shape:?}")] {
                assert!(error.contains(word), "{word:?} is not in: {error}");
            }
        }
        let error = checkpoint.rows("absent", [6, 4], 0..1).unwrap_err().to_string();
        assert!(error.contains("lacks tensor absent, expected with shape [6, 4]"), "{error}");
        // `tensor` folds nothing.
        assert!(checkpoint.tensor("experts", &[6, 4]).is_err());
        assert!(checkpoint.tensor("experts", &[3, 1, 2, 4]).is_ok());
    }
}

#[test]
fn rows_that_nothing_asked_for_are_told() {
    let left = |ranges: &[(usize, usize)]| {
        let [checkpoint, _] = open(&[("a", &[4, 2, 3])]);
        for &(from, to) in ranges {
            checkpoint.rows("a", [8, 3], from..to).unwrap();
        }
        checkpoint.check_all_used(&[]).map_err(|e| e.to_string())
    };
    assert_eq!(left(&[(0, 8)]), Ok(vec![]));
    assert_eq!(left(&[(4, 8), (2, 3), (0, 2), (3, 4)]), Ok(vec![]));
    for (ranges, rows) in [
        (vec![(0, 7)], "rows 7..8"),
        (vec![(1, 8)], "rows 0..1"),
        (vec![(0, 2), (5, 8)], "rows 2..5"),
        (vec![(0, 1), (2, 3), (4, 8)], "rows 1..2"),
    ] {
        let error = left(&ranges).unwrap_err();
        assert!(error.contains(&format!("{rows} of tensor a [4, 2, 3] belong to no part")), "{error}");
    }
    assert!(left(&[]).unwrap_err().contains("tensor a belongs to no part"));
    assert!(left(&[(0, 0)]).unwrap_err().contains("tensor a belongs to no part"));

    // Several tensors, and what is ignored.
    let [checkpoint, _] = open(&[("a", &[2, 2]), ("mtp.b", &[2, 2]), ("mtp.c", &[2, 2]), ("d", &[2, 2])]);
    checkpoint.rows("mtp.b", [2, 2], 0..1).unwrap();
    let ignored = ["mtp.".to_string(), "visual.".to_string()];
    let error = checkpoint.check_all_used(&ignored).unwrap_err().to_string();
    assert!(error.contains("tensor a and 1 more"), "{error}");
    checkpoint.tensor("a", &[2, 2]).unwrap();
    checkpoint.tensor("d", &[2, 2]).unwrap();
    assert_eq!(checkpoint.check_all_used(&ignored).unwrap(), ["mtp."]);
}

/// A tensor far larger than memory, most of it a hole in the file.
#[test]
fn only_the_rows_asked_for_are_read() {
    let (rows, columns) = (1usize << 22, 1usize << 12);
    let header = json!({"w": {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, rows * columns * 4]}});
    let header = header.to_string();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    let mut file = File::create(dir.path().join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len((8 + header.len() + rows * columns * 4) as u64).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    for row in [0, rows / 2, rows - 1] {
        let read = checkpoint.rows("w", [rows, columns], row..row + 1).unwrap();
        assert!(read.to_f32().iter().all(|x| *x == 0.0));
    }
}

#[test]
fn a_file_that_shrinks_after_it_was_opened_gives_an_error() {
    let files = Files::plain();
    let dir = files.write();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let path = dir.path().join("model.safetensors");
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(files.bytes().len() as u64 / 2).unwrap();
    let mut lost = 0;
    for (name, stored) in &files.tensors {
        let Err(error) = checkpoint.tensor(name, &stored.shape) else { continue };
        assert!(error.to_string().contains(name.as_str()), "{error}");
        lost += 1;
    }
    assert!((1..files.tensors.len()).contains(&lost));
    assert!(checkpoint.fingerprint().is_err());
}

#[test]
fn the_fingerprint_is_of_everything_stored() {
    let files = Files::plain();
    let print = |files: &Files| Checkpoint::open(files.write().path()).unwrap().fingerprint().unwrap();
    let mut hash = blake3::Hasher::new();
    let mut field = |bytes: &[u8]| {
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    let mut large = files.clone();
    // More than is hashed at a time, and no multiple of it.
    let shape = [3, 100_003];
    large.tensors.insert("large".to_string(), Stored::f32(&shape, &values(&shape)));
    field(large.config.to_string().as_bytes());
    for (name, t) in &large.tensors {
        field(name.as_bytes());
        field(format!("{:?} {:?}", t.dtype, t.shape).as_bytes());
        field(&t.data);
    }
    let whole: [u8; 32] = hash.finalize().into();
    assert_eq!(print(&large), whole);
    assert_eq!(Checkpoint::open(large.write_sharded(|_| {}).path()).unwrap().fingerprint().unwrap(), whole);

    // Any change of any kind changes it.
    let mut changed = vec![files.clone(), files.clone(), files.clone(), files.clone()];
    changed[0].tensors.get_mut("model.norm.weight").unwrap().data[0] ^= 1;
    let norm = changed[1].tensors.remove("model.norm.weight").unwrap();
    changed[1].tensors.insert("model.norm.bias".to_string(), norm);
    changed[2].tensors.get_mut("model.norm.weight").unwrap().shape = vec![1, 64];
    let norm = changed[3].tensors.get_mut("model.norm.weight").unwrap();
    (norm.dtype, norm.shape) = (Dtype::F16, vec![128]);
    changed.push(files.clone().with("rms_norm_eps", json!(1e-3)));
    let mut prints: Vec<_> = changed.iter().map(print).collect();
    prints.push(print(&files));
    prints.sort_unstable();
    prints.dedup();
    assert_eq!(prints.len(), 6);
}
