// Trains, saves and samples over gRPC, and goes on when the trainer is killed in between. It needs nothing but proto/.
//
//     npm install && node client.js 127.0.0.1:8001 127.0.0.1:8002      (trainer, sampler; TINSMITH_API_KEY, if any)
'use strict';

const path = require('path');
const {randomUUID} = require('crypto');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const PROTO = process.env.TINSMITH_PROTO || path.join(__dirname, '../../../proto');
const STEPS = 6;
const PATIENCE_MS = 10 * 60 * 1000;
const LOST = [grpc.status.UNAVAILABLE, grpc.status.CANCELLED, grpc.status.DEADLINE_EXCEEDED];

const files = ['trainer', 'sampler'].map((name) => `tinsmith/v1/${name}.proto`);
const definition = loader.loadSync(files, {includeDirs: [PROTO], keepCase: true, longs: Number, enums: String});
const {TrainerService, SamplerService} = grpc.loadPackageDefinition(definition).tinsmith.v1;
const options = {'grpc.max_receive_message_length': 256 * 2 ** 20};
const connect = (Service, address) => new Service(address, grpc.credentials.createInsecure(), options);

function call(client, method, request) {
  const metadata = new grpc.Metadata();
  if (process.env.TINSMITH_API_KEY) metadata.set('x-api-key', process.env.TINSMITH_API_KEY);
  return new Promise((resolve, reject) =>
    client[method](request, metadata, (error, reply) => (error ? reject(error) : resolve(reply))));
}

// The loop of docs/grpc.md: an operation has a number, so that it may be sent again until it is answered.
async function operate(client, method, request) {
  const until = Date.now() + PATIENCE_MS;
  for (let delay = 250; ; delay = Math.min(2 * delay, 5000)) {
    try {
      return await call(client, method, request);
    } catch (error) {
      // The trainer's errors have details. A connection that is cut in the middle of an answer is INTERNAL without them,
      // and a message that is too large, and always will be, RESOURCE_EXHAUSTED without them.
      const own = error.metadata.get('grpc-status-details-bin').length > 0;
      const again = error.code === (own ? grpc.status.RESOURCE_EXHAUSTED : grpc.status.INTERNAL);
      if (!(LOST.includes(error.code) || again) || Date.now() > until) throw error;
      console.log(`${method} ${request.seq_id || 0}: ${error.details}; once more`);
      await new Promise((resume) => setTimeout(resume, delay * (1 + Math.random() / 2)));
    }
  }
}

const bytesOf = (array) => Buffer.from(array.buffer);
const chunk = (tokens) => ({encoded_text: {tokens: bytesOf(Int32Array.from(tokens))}});

function datum(tokens) { // predict each token from those before it
  const targets = BigInt64Array.from(tokens.slice(1), BigInt);
  return {
    model_input: [chunk(tokens.slice(0, -1))],
    loss_fn_inputs: {target_tokens: {dense: bytesOf(targets), dtype: 'DTYPE_INT64'}},
  };
}

async function main() {
  const [trainer, sampler] = [connect(TrainerService, process.argv[2]), connect(SamplerService, process.argv[3])];
  const tokens = Array.from({length: 16}, (_, n) => 5 + ((7 * n) % 90));
  const model_id = `node-${randomUUID()}:train:0`;
  const lora_config = {rank: 8, seed: 1, train_attn: true, train_mlp: true, train_unembed: true};
  const info = await operate(trainer, 'GetTrainerInfo', {});
  await operate(trainer, 'CreateModel', {model_id, base_model: info.base_models[0], lora_config});
  let seq_id = 0;
  for (let step = 1; step <= STEPS; step++) {
    const forward = {model_id, seq_id: ++seq_id, data: [datum(tokens)], loss_fn: 'cross_entropy'};
    const optim = {model_id, seq_id: ++seq_id, adam_params: {learning_rate: 0.01}};
    // Both are sent before either is awaited; the trainer runs them in the order of their numbers.
    const [result] = await Promise.all([
      operate(trainer, 'ForwardBackward', forward),
      operate(trainer, 'OptimStep', optim),
    ]);
    console.log(`step ${step}: loss ${result.metrics['loss:sum'].toFixed(6)}`);
    if (process.env.TINSMITH_PAUSE_MS) await new Promise((go) => setTimeout(go, Number(process.env.TINSMITH_PAUSE_MS)));
  }
  const kind = 'CHECKPOINT_KIND_EPHEMERAL';
  const saved = await operate(trainer, 'SaveCheckpoint', {model_id, seq_id: ++seq_id, kind});
  const {sequences} = await operate(sampler, 'Sample', {
    version_id: saved.checkpoint.version_id,
    prompt: [chunk(tokens.slice(0, 4))],
    num_samples: 1,
    sampling_params: {max_tokens: 8, temperature: 0, stop: {}},
  });
  const drawn = new Int32Array(Uint8Array.from(sequences[0].tokens).buffer);
  console.log(`sampled ${[...drawn].join(' ')} (${sequences[0].stop_reason})`);
  await operate(trainer, 'DeleteModel', {model_id});
  trainer.close();
  sampler.close();
}

main().catch((error) => {
  console.error(`${grpc.status[error.code] || ''} ${error.details || error.stack}`);
  process.exitCode = 1;
});
