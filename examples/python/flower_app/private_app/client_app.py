"""The client: trains on its own data and sends one clipped update."""

import dpmf.flower
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from private_app.task import local_data, train

app = ClientApp(mods=[dpmf.flower.clipping_mod])
dpmf.flower.answer_enrolment(app)


@app.train()
def on_train(message: Message, context: Context) -> Message:
    inputs, targets = local_data(context.node_config["partition-id"])
    (weights,) = message.content["arrays"].to_numpy_ndarrays()
    trained = ArrayRecord([train(weights, inputs, targets)])
    return Message(RecordDict({"arrays": trained}), reply_to=message)
