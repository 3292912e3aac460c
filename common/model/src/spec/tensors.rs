//! The tensors that a description asks for. Kept beside the description, so that sizes told without weights and tests
//! with made-up weights cannot miss one that loading reads.

use std::collections::BTreeMap;

use super::{
    AttentionSpec, DecaySpec, ExpertsSpec, FeedSpec, LatentSpec, LayerSpec, MixerSpec, MlpSpec, ModelSpec, NormSpec,
    ProjectionSpec, RecurrentSpec, RowSource, WriteSpec,
};

impl ModelSpec {
    /// Every tensor that the model needs, whole, by name: `[rows, columns]` (leading axes folded, that of a convolution's
    /// single input dropped) or `[n]`. `fused` asks for the fused layout of experts where there is one.
    pub fn tensors(&self, fused: bool) -> BTreeMap<String, Vec<usize>> {
        let mut all = Tensors { found: BTreeMap::new(), hidden: self.hidden, fused };
        for name in [Some(&self.embed), self.head.as_ref()].into_iter().flatten() {
            all.found.insert(name.clone(), vec![self.vocab, self.hidden]);
        }
        all.norm(&self.final_norm);
        self.layers.iter().for_each(|layer| all.layer(layer));
        all.found
    }
}

struct Tensors {
    found: BTreeMap<String, Vec<usize>>,
    hidden: usize,
    fused: bool,
}

impl Tensors {
    fn vector(&mut self, name: &str, len: usize) {
        self.found.insert(name.to_string(), vec![len]);
    }

    fn norm(&mut self, norm: &NormSpec) {
        self.vector(&norm.name, norm.width);
    }

    fn rows<'a>(&mut self, sources: impl IntoIterator<Item = &'a RowSource>, columns: usize) {
        for source in sources {
            self.found.insert(source.name.clone(), vec![source.blocks * source.block_rows, columns]);
        }
    }

    fn projection(&mut self, projection: &ProjectionSpec) {
        let hidden = self.hidden;
        match projection {
            ProjectionSpec::Direct(rows) => self.rows(rows, hidden),
            ProjectionSpec::LowRank { down, up } => {
                self.rows([down], hidden);
                self.rows([up], down.rows());
            }
        }
    }

    fn layer(&mut self, layer: &LayerSpec) {
        self.norm(&layer.mixer.norm);
        match &layer.mixer.body {
            MixerSpec::Recurrent(m) => self.recurrent(m),
            MixerSpec::Attention(m) => self.attention(m),
            MixerSpec::Latent(m) => self.latent(m),
        }
        let Some(feed) = &layer.feed else { return };
        self.norm(&feed.norm);
        match &feed.body {
            FeedSpec::Dense(mlp) => self.mlp(mlp, self.hidden),
            FeedSpec::Experts(experts) => self.experts(experts),
        }
    }

    fn recurrent(&mut self, m: &RecurrentSpec) {
        let (hidden, heads) = (self.hidden, m.shape.heads);
        self.rows(&m.channels, hidden);
        if let Some(conv) = &m.conv {
            self.rows(&conv.weight, conv.kernel);
            if let Some(bias) = &conv.bias {
                self.vector(bias, m.channels());
            }
        }
        match &m.decay {
            DecaySpec::Fixed { .. } => {}
            DecaySpec::Head { x, a_log, dt_bias, .. } => {
                self.rows(x, hidden);
                self.vector(a_log, heads);
                self.vector(dt_bias, heads);
            }
            DecaySpec::Channel { x, a_log, bias, .. } => {
                self.projection(x);
                self.vector(a_log, heads);
                self.vector(bias, heads * m.shape.d_k);
            }
        }
        if let WriteSpec::Delta { b, .. } = &m.write {
            self.rows(b, hidden);
        }
        if let Some(skip) = &m.skip {
            self.vector(skip, heads);
        }
        self.projection(&m.gate);
        [m.q_norm.as_ref(), m.k_norm.as_ref(), Some(&m.norm)].into_iter().flatten().for_each(|n| self.norm(n));
        self.rows([&m.out], heads * m.shape.d_v);
    }

    fn attention(&mut self, m: &AttentionSpec) {
        self.rows(&m.project, self.hidden);
        [&m.q_norm, &m.k_norm].into_iter().flatten().for_each(|n| self.norm(n));
        self.rows([&m.out], m.heads * m.head_dim);
    }

    fn latent(&mut self, m: &LatentSpec) {
        self.projection(&m.query);
        self.rows([&m.latent], self.hidden);
        [m.query_norm.as_ref(), Some(&m.latent_norm)].into_iter().flatten().for_each(|n| self.norm(n));
        self.found.insert(m.up.clone(), vec![m.heads * (m.nope + m.d_v), m.rank]);
        self.rows(m.gate.iter().flatten(), self.hidden);
        self.rows([&m.out], m.heads * m.d_v);
    }

    /// An MLP of rows of `columns` columns.
    fn mlp(&mut self, mlp: &MlpSpec, columns: usize) {
        self.rows(&mlp.gate_up, columns);
        self.rows([&mlp.down], mlp.inner);
    }

    fn experts(&mut self, e: &ExpertsSpec) {
        self.rows([&e.router], self.hidden);
        if let Some(bias) = &e.bias {
            self.vector(bias, e.route.experts);
        }
        let experts = e.fused.as_ref().filter(|_| self.fused).unwrap_or(&e.experts);
        let width = e.narrow.as_ref().map_or(self.hidden, |[down, _]| down.rows());
        experts.iter().for_each(|expert| self.mlp(expert, width));
        e.shared.iter().for_each(|shared| self.mlp(shared, self.hidden));
        if let Some([down, up]) = &e.narrow {
            self.rows([down], self.hidden);
            self.rows([up], width);
        }
        self.rows(&e.shared_gate, self.hidden);
    }
}
