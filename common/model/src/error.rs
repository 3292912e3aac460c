use std::path::PathBuf;

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file cannot be read.
    #[error("cannot read {path}: {reason}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        reason: std::io::Error,
    },
    /// The configuration is wrong or incomplete.
    #[error("{file}: {key}: {problem}")]
    Config {
        /// `config.json`, or another of its kind.
        file: String,
        /// The key, dotted.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The checkpoint has something that the engine cannot serve.
    #[error("unsupported model: {0}")]
    Unsupported(String),
    /// The weights do not fit the configuration, or are damaged.
    #[error("{file}: {problem}")]
    Checkpoint {
        /// The file.
        file: String,
        /// What is wrong.
        problem: String,
    },
}

impl ModelError {
    pub(crate) fn checkpoint(file: impl Into<String>, problem: impl Into<String>) -> Self {
        ModelError::Checkpoint { file: file.into(), problem: problem.into() }
    }
}
