/* Ranks the sections of the site for questions as people type them: by all words of a question, their forms and other names,
   and by the words that a comment below a heading adds (`<!-- also: … -->`, see hooks.py). The search of the theme takes words
   literally, ranks whole pages, and shows one section of each. */
(() => {
  const SHOWN = 20; // sections
  const LONG = 500; // characters of a part of a section
  const FIELDS = [["title", 4, 0.4], ["also", 3, 0.2], ["page", 0.8, 0], ["text", 1, 0.75]]; // weight, and how much length counts
  const SATURATION = 1.2; // k1 of BM25
  const PAIR = 0.8; // weight of two words of a question that follow each other
  const PHRASE = 0.2; // of two words that follow each other, one of which is common
  const IN_TEXT = 0.8; // of a word that only the text has, in the part of a question that a section covers
  const OTHER = 0.6; // weight of another name of a word
  const COMMON = new Set(
    `a able about above across actually advice after afterwards again against all allow allows almost alone along already also although always
      am among amongst amoungst amount an and another any anybody anyhow anyone anything anyway anywhere are around as ask asks at automatically
      basically be became because become becomes becoming been before beforehand behind being below beside besides better between beyond
      both but by can can't cannot cant clarity clear come comes coming compatible computed correct correctly could couldnt currently deal
      dealing did directly do does doesn't doing don't done due during each easily eg either else elsewhere enough etc even ever every everyone
      everything everywhere exactly except explain few find fix for formerly from further get getting give go goes going gone good got had
      handle handled happen happening happens has hasnt have he help hence her here hereafter hereby herein hereupon hers herself him himself
      hint his how how's however i i'm idea ie if in indeed instead into is isn't issue issues it it's its itself just keep know latter latterly
      let like look made make many may me mean meaning means meant meanwhile might mill mine more moreover most mostly much must my myself
      namely need needs neither never nevertheless nice no nobody none noone nor normally not nothing now nowhere of off often on once one only
      onto options or other others otherwise our ours ourselves out over own per perhaps please possibility possible problem proper properly put
      puts question rather re really recommended regularly require required requires resolve right same see seem seemed seeming seems sense set
      she should simply since so solve some somebody somehow someone something sometime sometimes somewhere still such suggestion suggestions
      sure take tell than thanks that the their them themselves then thence there there's thereafter thereby therefore therein thereupon these
      they thick thin thing this those though through throughout thru thus to too toward towards trying twenty unable under understand unsure
      until up upon us use used using very via want was way ways we well were what what's whatever when whence whenever where whereafter whereas
      whereby wherein whereupon wherever whether which while whither who whoever whom whose why will with within without wonder wondering work
      works would wrongly yes yet you your yours yourself yourselves`.split(/\s+/),
  );
  // Names of one thing in a line. Names of several words are found in questions only.
  const NAMES = `
oom, out of memory, not enough memory, memory error, outofmemoryerror, runs out of memory
gpu, cuda, graphics card, nvidia, vram
wandb, weights and biases, weights & biases
resume, continue, restart, ckpt path, pick up where, resume from checkpoint
sweep, search, tune, hpo, hyperopt, hyperparameter search, hyperparameter optimization, hyperparameter tuning, optuna
hyperparameter, hparam, hyper parameter, hyper-parameter
multi gpu, several gpus, multiple gpus, many gpus, all gpus, two gpus, 2 gpus, 4 gpus, 8 gpus, more than one gpu, ddp, distributed data parallel, data parallel, distributed training
multi node, several nodes, multiple nodes, two nodes, many nodes, multinode
several, multiple, many
two, 2
three, 3
four, 4
config, configuration, setting, settings, yaml, option
argument, parameter, override, flag, command line
print, show, display, list, view, see
delete, remove, clean up, cleanup, prune
disable, turn off, switch off, deactivate, suppress, hide, silence
enable, turn on, switch on, activate
folder, directory, dir, path, location
save, store, write
load, read, open, import
inference, predict, prediction, inferring
evaluate, test, evaluation
deploy, serve, serving, rest api, http, endpoint, production, fastapi, flask, web service
checkpoint, ckpt, snapshot, weights file, saved checkpoint, checkpoint file, saved model
best checkpoint, best model, best weights
learning rate, lr, stepsize, step size
learning rate finder, lr finder, lr find, find learning rate, auto lr find
scheduler, schedule, lr scheduler, annealing, decay
early stopping, earlystopping, stop early, patience
batch size, batchsize, bs, samples per batch
gradient accumulation, accumulate gradients, accumulate grad batches, accumulation
gradient clipping, clip gradients, clip grad norm, grad clip, clip gradient, gradient clip val
mixed precision, amp, fp16, bf16, half precision, float16, bfloat16, 16 bit, autocast, precision
gradient checkpointing, activation checkpointing, recompute activations
nan, inf, non-finite, nonfinite, infinity, diverge, explode
reproducible, reproduce, reproducibility, deterministic, determinism, same results, repeatable, bitwise
seed, random state, random seed, manual seed, seed everything
cross validation, kfold, k-fold, folds, fold, crossval
validation, val, dev set, eval set
dataset, data, datamodule, data set
dataloader, data loader, loader
worker, num workers, subprocess
folder of images, imagefolder, image folder, own images, my images, jpg, png, pictures, photos
csv, table, tabular, dataframe, pandas, excel, spreadsheet
parquet, arrow, feather
augmentation, augment, transforms, random crop, flip, albumentations
imbalanced, imbalance, class weights, rare class, unbalanced, weighted loss, oversample
normalize, standardize, scaler, standardscaler, normalization, mean and std, standardization
missing values, impute, imputation, nan in data, fillna
split, train test split, holdout, random split
group, patient, subject
leak, leakage, overlap, contamination, duplicate
pretrained, pre-trained, fine tune, finetune, transfer learning, backbone, foundation model
freeze, frozen, requires grad, unfreeze
layer wise, layerwise, discriminative, early layers, different learning rates, learning rate per layer, param groups, parameter groups, per layer learning rate
ema, exponential moving average, swa, stochastic weight averaging, average weights, weight averaging, model averaging
optimizer, adam, sgd, adamw
loss function, criterion, custom loss, objective
metric, score, torchmetrics
auc, auroc, roc, roc curve
confusion matrix, per class accuracy, classification report, metrics per class
logger, logging, log, track, tracking, experiment tracker
plot, chart, graph, curve, visualize, draw, figure
tensorboard, tb
mlflow, comet, neptune, clearml, aim, trackio
offline, no internet, without internet, airgapped, air-gapped, air gapped, behind firewall, proxy, no network
login, log in, api key, token, authentication, credentials, password, secret
slurm, sbatch, srun, hpc, cluster, supercomputer, queue
partition, account, qos
job array, array job
preemption, preempted, sigterm, requeue, time limit, timeout, walltime, spot, spot instance, killed, interrupted, interruption
container, docker, apptainer, singularity, podman, image
kubernetes, k8s, kubeflow, pod
cloud, aws, gcp, azure, sagemaker, vertex ai, ec2, skypilot
s3, bucket, object storage, cloud storage, gcs, minio
ray, ray tune, ray cluster
fsdp, fully sharded, zero, deepspeed, sharded, model does not fit, too large, big model, large model, offload
tensor parallel, model parallel, pipeline parallel
nccl, rendezvous, allreduce, communication, hang, stuck, freeze up, deadlock, hangs, freezes
mac, macos, apple silicon, m1, m2, mps, apple
tpu, xla
windows, wsl, wsl2
notebook, jupyter, colab, ipynb, ipython, kaggle
vscode, vs code, visual studio code, pycharm, ide, editor
breakpoint, pdb, debugger, set trace, step through, debug
debug, diagnose, troubleshoot, find bug
profile, profiler, profiling, slow, speed, bottleneck, performance, faster, speed up, utilization
compile, torch compile, torchcompile, inductor, graph break
test, pytest, unit test, unittest
ci, github actions, continuous integration, gitlab ci
type check, mypy, pyright, types, type hints
lint, linter, ruff, flake8, black, pre-commit, formatting
onnx, onnxruntime, tensorrt, openvino
torchscript, torch script, jit, torch export, libtorch
quantize, quantization, int8, quantized, 8 bit
hugging face, huggingface, hf, hub, transformers
tokenizer, tokenize, bpe, sentencepiece
text, nlp, sentence, document
language model, llm, gpt, causal lm
audio, wav, speech, spectrogram, sound, mp3
time series, forecast, forecasting, sequence
segmentation, unet, mask
detection, bounding box, faster rcnn, coco, yolo
graph network, gnn, graph neural network, pytorch geometric, pyg
reinforcement learning, gym, gymnasium, rl, environment steps
regression, continuous target, predict a number
multi label, multilabel, several labels, multiple labels
ensemble, average predictions, combine models, average several models
compare, comparison, difference, versus, diff
significant, significance, confidence interval, p-value, statistical test, error bars
find best, best run, leaderboard, rank, sort
install, setup, set up, installation, pip install
uninstall, remove package
uv, poetry, conda, venv, virtual environment, mamba, pip
version, versions, compatible, supported, compatibility, requirement
upgrade, update, newer version, new release
template, cookiecutter, scaffold, boilerplate, skeleton, starter, new project, create a project
hydra, omegaconf
lightningcli, lightning cli, jsonargparse
multirun, -m, multi-run
interpolation, resolver, reference
default, defaults, defaults list, inherit, inheritance, extend config, base config
environment variable, env var, dotenv, env file, environ
callback, hook
progress bar, tqdm, progressbar, rich bar
manual optimization, two optimizers, several optimizers, multiple optimizers, gan
lightningmodule, lightning module, pl module, plmodule, litmodel
nn.module, plain pytorch, pure pytorch, vanilla pytorch, raw pytorch
git, commit, uncommitted, dirty
pickle, weights only, unsafe, malicious, arbitrary code, security
license, licence, commercial, mit, apache
cite, citation, bibtex, paper
contribute, contributing, pull request
telemetry, phone home, analytics, privacy
notify, notification, email, slack, alert
background, nohup, tmux, screen, detach, detached, logout
ctrl c, keyboardinterrupt, keyboard interrupt, abort, stop a run, cancel
crash, crashed, failed, failure, dies
share, colleague, coworker, collaborate, team
report, html, summary
submission, kaggle submission
submit, launch, launcher
remote, ssh, server
disk, disk space, quota, storage, disk full
cpu, core, thread
without gpu, without a gpu, no gpu, cpu only
ram, memory
shape, size, dimension
epoch, epochs
limit, subset, fraction, part of the data, small part, percent
sampler, weightedrandomsampler, batch sampler
collate, collate fn, padding, variable length, different lengths
dropout, weight decay, regularization, overfit, overfitting
error, exception, traceback, stack trace
warning, warnings
select, choose, pick, specify
architecture, structure, layers
extract, get, access, retrieve, obtain, fetch
avoid, prevent, stop, skip
change, modify, edit, adjust, customize
combine, merge, join, concatenate, mix
convert, migrate, port, transform
network, model
existing, earlier, previous, trained
slow, long, takes, delay
fast, quick, faster
cache, preload, memory
custom, own, my own, user defined
example, tutorial, demo, sample code
notes, description, comment
average, mean
std, standard deviation, variance
maximum, limit, max
minimum, min
local, laptop, workstation, desktop
decrease, fall, drop, go down, improve, reduce, lower, decline, shrink
increase, rise, grow, go up, raise, climb
interrupt, stop, abort, quit, halt, terminate, end, cancel, finish
pause, suspend, sleep
periodic, periodically, regular, every
machine, computer, server
shuffle, random order, order
intermediate, hidden, layer output, feature extraction, activation, feature map
rnn, lstm, gru, recurrent
modify, replace, swap
overwrite, override, precedence, take precedence
check, verify, validate, inspect, look at
calculate, compute
wrong, incorrect, bad, poor, weird, strange
begin, start, first steps, get started, quickstart
requirement, requirements, needed, prerequisite
support, supported, available
boolean, bool, true, false
reason, cause
meaning, definition, glossary, term
workflow, pipeline
team, colleague, people, users
folder name, run name, experiment name
target, label, annotation
generate, sample text, generation
threshold, cutoff
duplicate, copy, clone
index, number, id
`;

  const stems = new Map();
  /* What the forms of a word have in common: "resum" of "resumed", "resuming" and "resume". */
  function stem(word) {
    word = word.toLowerCase();
    if (!stems.has(word)) {
      let rest = word;
      for (let before = ""; before !== rest; ) {
        before = rest;
        const cut = rest.replace(/(?:i?[sz]ations?|ations?|ings?|ions?|ors?|ers?|ed|ies|es|s|e|y|ly|ments?)$/, "");
        if (cut.length >= 3 && /[aeiouy]/.test(cut)) rest = cut.replace(/([bdfgklmnprt])\1$/, "$1");
      }
      stems.set(word, rest);
    }
    return stems.get(word);
  }

  /* Stems of a text in order, each with those of its parts: of "num_workers" also "num" and "workers". */
  const words = (text) =>
    (text.replace(/&amp;/g, "&").replace(/w&b/gi, "wandb").match(/[\p{L}\p{N}_']+/gu) ?? []).map((word) => {
      const parts = word.match(/\p{Lu}?\p{Ll}+|\p{Lu}+(?!\p{Ll})|\p{N}+|\p{L}+/gu) ?? [];
      return { word, all: [...new Set([word.replace(/^_+|_+$/g, ""), ...(parts.length > 1 ? parts : [])].map(stem))] };
    });

  const others = new Map(); // of a name: the other names of its line
  const long = new Map(); // of the first stem of a name of several words: all its stems
  for (const line of NAMES.trim().split("\n")) {
    const names = line.split(", ").map((name) => words(name).map(({ all }) => all[0]));
    const joined = names.map((name) => name.join(""));
    for (const [i, name] of names.entries()) {
      others.set(joined[i], [...(others.get(joined[i]) ?? []), ...joined.filter((other) => other !== joined[i])]);
      if (name.length > 1) long.set(name[0], [...(long.get(name[0]) ?? []), name].sort((a, b) => b.length - a.length));
    }
  }

  /* The longest name of several words that begins at a word, as its stems. */
  const nameAt = (found, i) => long.get(found[i].all[0])?.find((name) => name.every((part, j) => found[i + j]?.all[0] === part));

  /* Sections with the terms of each field, and the number of sections that have a term. */
  function index(docs) {
    const pages = new Map(docs.filter((doc) => !doc.location.includes("#")).map((doc) => [doc.location, doc]));
    const number = new Map();
    const sections = docs.map((doc) => {
      const page = pages.get(doc.location.split("#")[0]) ?? doc;
      const fields = { title: doc.title, also: doc.also ?? "", page: page === doc ? "" : page.title, text: doc.text };
      const section = { doc, page, boost: (doc.boost ?? 1) * (/\.(?:py|yaml)$/.test(doc.title) ? 0.5 : 1), fields: {} };
      const seen = new Set();
      for (const [name] of FIELDS) {
        const counts = new Map();
        const found = words(fields[name].replace(/<[^>]*>/g, " "));
        for (const [i, { all }] of found.entries()) {
          const pair = i ? [found[i - 1].all[0] + all[0]] : []; // so "data loader" is found in "dataloader", too
          const name = nameAt(found, i);
          for (const term of new Set([...all, ...pair, ...(name ? [name.join("")] : [])])) counts.set(term, (counts.get(term) ?? 0) + 1);
        }
        for (const term of counts.keys()) seen.add(term);
        section.fields[name] = { counts, length: found.length };
      }
      for (const term of seen) number.set(term, (number.get(term) ?? 0) + 1);
      return section;
    });
    const mean = Object.fromEntries(
      FIELDS.map(([name]) => [name, sections.reduce((sum, { fields }) => sum + fields[name].length, 0) / sections.length || 1]),
    );
    return { sections, number, mean };
  }

  /* Whether two words differ by one letter that is missing, added, another one, or swapped with the next. */
  function near(a, b) {
    if (Math.abs(a.length - b.length) > 1) return false;
    let start = 0;
    while (start < a.length && a[start] === b[start]) start++;
    const [x, y] = [a.slice(start), b.slice(start)];
    return x.slice(1) === y.slice(1) || x.slice(1) === y || x === y.slice(1) || (x[0] === y[1] && x[1] === y[0] && x.slice(2) === y.slice(2));
  }

  const isCommon = ({ word }) => COMMON.has(word.toLowerCase());

  /* The terms of a question: alternatives with their weights, and words that belong to them. */
  function ask(query, { number }) {
    const asked = words(query.replace(/"|\*/g, " "));
    const terms = [];
    let found = [];
    for (let i = 0; i < asked.length; i++) {
      const name = nameAt(asked, i);
      if (!name) found.push(asked[i]);
      else {
        terms.push({ shown: asked.slice(i, i + name.length).map(({ word }) => word), weight: 1.5, names: [[name.join(""), 1]] });
        i += name.length - 1;
      }
    }
    const telling = found.filter((one) => !isCommon(one));
    if (telling.length || terms.length) found = telling;
    for (let i = 1; i < asked.length; i++) // "where are", "which model": phrases that the other words of a section may have
      if (isCommon(asked[i]) || isCommon(asked[i - 1])) terms.push({ shown: [], weight: PHRASE, names: [[asked[i - 1].all[0] + asked[i].all[0], 1]] });
    for (const [i, { word, all }] of found.entries()) {
      const names = [[all[0], 1], ...all.slice(1).map((part) => [part, 0.4])];
      if (!number.has(all[0]) || i === found.length - 1)
        for (const term of number.keys())
          if (term.startsWith(all[0]) && all[0].length > 2 && term.length <= all[0].length + 5) names.push([term, number.has(all[0]) ? 0.3 : 0.7]);
      if (names.every(([name]) => !number.has(name))) // a word that is misspelt
        for (const term of number.keys()) if (all[0].length > 3 && near(all[0], term)) names.push([term, 0.7]);
      const digits = /^\d+$/.test(word); // which tell little of what is asked
      terms.push({ shown: digits ? [] : [word], weight: digits ? 0.3 : 1, names });
      if (i) terms.push({ shown: [], weight: PAIR, names: [[found[i - 1].all[0] + all[0], 1]] });
    }
    for (const term of terms)
      for (const [name, weight] of [...term.names])
        for (const other of others.get(name) ?? []) if (weight === 1) term.names.push([other, OTHER]);
    return terms;
  }

  /* Sections by their score, the highest first. */
  function rank(query, built) {
    const { sections, number, mean } = built;
    const terms = ask(query, built);
    const rarity = (name) => Math.log(1 + (sections.length - number.get(name) + 0.5) / (number.get(name) + 0.5));
    for (const term of terms) {
      term.names = term.names.filter(([name]) => number.has(name)).map(([name, weight]) => [name, weight]);
      term.rarity = Math.max(0, ...term.names.map(([name, weight]) => weight * rarity(name)));
    }
    const single = terms.filter((term) => term.shown.length);
    const whole = single.reduce((sum, term) => sum + term.rarity, 0);
    const ranked = [];
    for (const section of sections) {
      let score = 0;
      let covered = 0;
      const matched = new Set();
      const missing = [];
      for (const term of terms) {
        let most = 0;
        let named = false; // in the title, or in the other words for it
        for (const [name, weight] of term.names) {
          let frequency = 0;
          for (const [field, value, b] of FIELDS) {
            const { counts, length } = section.fields[field];
            if (!counts.has(name)) continue;
            frequency += (value * counts.get(name)) / (1 - b + (b * length) / mean[field]);
            named ||= value > 1;
          }
          if (!frequency) continue;
          matched.add(name);
          most = Math.max(most, weight * rarity(name) * (frequency / (frequency + SATURATION)));
        }
        score += term.weight * most;
        if (most && term.shown.length) covered += named ? term.rarity : IN_TEXT * term.rarity;
        if (!most) missing.push(...term.shown);
      }
      if (score) ranked.push({ section, score: score * section.boost * (0.3 + (0.7 * covered) / whole), matched, missing });
    }
    return ranked.sort((a, b) => b.score - a.score).slice(0, SHOWN);
  }

  /* A text with the matched words marked. */
  const marked = (text, matched) =>
    text.replace(/<[^>]*>|&\w+;|[\p{L}\p{N}_]+/gu, (part) =>
      /^[<&]/.test(part) || !words(part)[0]?.all.some((name) => matched.has(name)) ? part : `<mark>${part}</mark>`,
    );

  /* The first two parts of a text that have matched words, or its beginning; of long ones, such as tables, the words only. */
  function teaser(text, matched) {
    const parts = text.split(/(?=<(?:p|pre|ul|ol|div)\b)/);
    const found = parts.filter((part) => words(part.replace(/<[^>]*>/g, " ")).some(({ all }) => all.some((name) => matched.has(name))));
    return (found.length ? found : parts)
      .slice(0, 2)
      .map((part) => (part.length < LONG ? part : `<p>${part.replace(/<[^>]*>/g, " ").slice(0, LONG).replace(/&\w*$/, "")}…</p>`))
      .join("");
  }

  /* What the page shows: each section below the title of its page. */
  const results = (query, built) =>
    rank(query, built).map(({ section: { doc, page }, score, matched, missing }) => {
      const terms = Object.fromEntries(missing.map((word) => [word, false]));
      const shown = { ...doc, title: marked(doc.title, matched), text: marked(teaser(doc.text, matched), matched), score, terms };
      return page === doc ? [shown] : [shown, { ...page, score: 0, terms: {} }];
    });

  const send = Worker.prototype.postMessage;
  let docs;
  let built;
  let ready; // before which the page does not count results
  Worker.prototype.postMessage = function (message, ...rest) {
    if (message?.type === 0 && message.data?.docs) {
      ({ docs } = message.data);
      message = { ...message, data: { ...message.data, docs: [] } };
      ready = new Promise((resolve) => this.addEventListener("message", ({ data }) => data.type === 1 && setTimeout(resolve)));
    } else if (message?.type === 2 && docs) {
      ready.then(() => {
        built ??= index(docs);
        const items = message.data.trim() ? results(message.data, built) : [];
        this.dispatchEvent(new MessageEvent("message", { data: { type: 3, data: { items } } }));
      });
      return undefined;
    }
    return send.call(this, message, ...rest);
  };
})();
